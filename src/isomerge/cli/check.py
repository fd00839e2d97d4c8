"""`isomerge check A B`: can these be merged, would alignment help, what to try."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice
from isomerge.cli.heap import keep_freed_memory
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


def check(
    models: Annotated[list[str], typer.Argument(metavar="A B …", help="Two or more models.")],
    base: Annotated[str | None, typer.Option(help="Their common ancestor: then also what each has learned.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every layer and space, and the recipe.")] = False,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the suggested recipe there; isomerge merge FILE runs it.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="For strangers: images or texts like those they saw; the recipe uses them."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say whether models fit together, and how to merge them. Takes seconds.

    One architecture and tokenizer? Siblings or strangers? How far apart is each layer, would alignment help, and which
    recipe is worth a try? Reads headers and a sample of the weights.
    """
    if len(models) < 2:
        raise RequestError("check compares models: name at least two, as in isomerge check model-a model-b.")
    if recipe is not None and recipe.exists() and not force:
        raise RequestError(
            f"--recipe {recipe} exists, and nothing is overwritten unasked. Name a new file, or --force."
        )

    import isomerge
    from isomerge.results import plain

    keep_freed_memory()
    voice = Voice(json, quiet)
    with voice.work():
        record = dict(plain(isomerge.check(*models, base=base, data=data)))
        if recipe is not None:
            record["recipe_file"] = _write(record, recipe)
    voice.show(record, full_table if explain else short_table)


def _write(record: dict[str, Any], path: Path) -> str | None:
    """None where there is no recipe to write: the suggestion says why."""
    if record["recipe"] is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {record['summary']}\n{record['recipe']}", encoding="utf-8")
    return str(path)


def short_table(record: dict[str, Any]) -> RenderableType:
    """The verdict in one sentence, why, and what to try."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import verbatim

    lines = [Text(record["summary"], style="bold"), *(Text(f"• {reason}") for reason in record["reasons"])]
    say = verbatim if record.get("recipe") else Text  # a command is copied; why there is none is read
    lines.append(say(f"try: {record['suggestion']}"))
    if record.get("why"):
        lines.append(Text(f"     {record['why']}", style="dim"))
    if "recipe_file" in record:
        lines.append(verbatim(f"recipe written: {record['recipe_file'] or 'no, there is nothing to merge'}"))
    return Group(*lines)


def full_table(record: dict[str, Any]) -> RenderableType:
    """All of the above, every layer and space, and the recipe."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import verbatim

    parts = [short_table(record), _layers(record), _spaces(record)]
    if record["recipe"]:
        parts.append(verbatim(f"\n{record['recipe'].rstrip()}"))
    if record["weights"]:
        weights = record["weights"]
        seen = f"{weights['sampled']:,} of {weights['parameters']:,} values in {weights['tensors']} tensors were read"
        parts.append(Text(f"\n{seen} ({record['seconds']:.1f} s)", style="dim"))
    return Group(*(part for part in parts if part is not None))


LAYER_COLUMNS = {
    "distance": "distance", "cosine": "cosine", "sign_conflict": "signs differ", "norm_ratio": "norm ratio",
    "change_cosine": "cosine of changes", "change_conflict": "changes opposed",
}  # fmt: skip


def _layers(record: dict[str, Any]) -> RenderableType | None:
    rows = record["layers"]
    known = [key for key in LAYER_COLUMNS if any(row.get(key) is not None for row in rows)]
    return _table("layer", {key: LAYER_COLUMNS[key] for key in known}, rows) if rows else None


def _spaces(record: dict[str, Any]) -> RenderableType | None:
    columns = {"distance": "distance", "moved": "would move", "gain": "gain", "by_chance": "gain by chance"}
    return _table("space", columns, record["spaces"]) if record["spaces"] else None


def _table(first: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    from isomerge.reporting.terminal import number

    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(Text(row["name"]), *(number(row.get(key)) for key in columns))
    return table
