"""`isomerge check A B`: can these be merged, would alignment help, what to try."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.flags import option, switch
from isomerge.cli.output import Record, Voice, as_record, listing
from isomerge.cli.verb import verb
from isomerge.errors import RequestError
from isomerge.text import as_flags

if TYPE_CHECKING:
    from rich.console import RenderableType

LAYER_COLUMNS = {
    "distance": "distance", "cosine": "cosine", "sign_conflict": "signs differ", "norm_ratio": "norm ratio",
    "change_cosine": "cosine of changes", "change_conflict": "changes opposed",
}  # fmt: skip
SPACE_COLUMNS = {"distance": "distance", "moved": "would move", "gain": "gain", "by_chance": "gain by chance"}


@verb("Report whether models fit together, and how to merge them.", "isomerge check model-a model-b")
def check(
    models: Annotated[list[str], typer.Argument(metavar="A B …", help="Two or more models.")],
    *,
    base: Annotated[
        str | None, option("MODEL", "Their common ancestor; then also compares what each model has learned.")
    ] = None,
    explain: Annotated[bool, switch("--explain", "Show every layer and space, and the recipe.")] = False,
    recipe: Annotated[
        Path | None, option("FILE", "Write the suggested recipe to this file; isomerge merge FILE runs it.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        option(
            "PATH",
            "Images or texts like their training data, once for all models or once per model, in order: merges are "
            "measured on them.",
            "--data",
        ),
    ] = None,
    force: Annotated[bool, switch("--force", "Replace FILE.")] = False,
    voice: Voice,
) -> None:
    """Report whether models fit together, and how to merge them. Takes seconds, with --data about a minute.

    Do they share architecture and tokenizer? Are they siblings or strangers? How far apart is each layer, would
    alignment help, what would a merge lose, and which recipe is worth a try? Reads headers and a sample of the weights;
    with --data it also makes merges in memory and measures them on held-out examples, without labels.
    """
    if len(models) < 2:
        raise RequestError("check compares models: name at least two, as in isomerge check model-a model-b.")
    if recipe is not None and recipe.exists() and not force:
        raise RequestError(f"--recipe {recipe} already exists. Name a new file, or add --force.")

    import isomerge
    from isomerge.system import keep_freed_memory

    keep_freed_memory()
    sources = [str(path) for path in data or ()]
    with voice.work("steps") as progress:
        given = sources if len(sources) > 1 else sources[0] if sources else None
        record = as_record(isomerge.check(*models, base=base, data=given, progress=progress))
        if recipe is not None:
            record["recipe_file"] = _write(record, recipe)
    voice.show(record, full_table if explain else short_table)


def _write(record: Record, path: Path) -> str | None:
    """None if there is no recipe to write: the suggestion says why."""
    if record["recipe"] is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {record['summary']}\n{record['recipe']}", encoding="utf-8")
    return str(path)


def short_table(record: Record) -> RenderableType:
    """The verdict in one sentence, the reasons, and what to try."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import verbatim

    lines = [Text(record["summary"], style="bold"), *(Text(f"• {reason}") for reason in record["reasons"])]
    show = verbatim if record.get("recipe") else Text  # a command is copied; the reason why there is none is read
    lines.append(show(f"try: {record['suggestion']}"))
    if record.get("why"):
        lines.append(Text(f"     {as_flags(record['why'])}", style="dim"))
    if "recipe_file" in record:
        lines.append(verbatim(f"recipe written: {record['recipe_file'] or 'no, there is nothing to merge'}"))
    return Group(*lines)


def full_table(record: Record) -> RenderableType:
    """All of the above, every layer and space, and the recipe."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import duration, verbatim

    parts = [short_table(record)]
    if rows := record["layers"]:
        known = [key for key in LAYER_COLUMNS if any(row.get(key) is not None for row in rows)]
        parts.append(_table("layer", {key: LAYER_COLUMNS[key] for key in known}, rows))
    if record["spaces"]:
        parts.append(_table("space", SPACE_COLUMNS, record["spaces"]))
    if record["recipe"]:
        parts.append(verbatim(f"\n{record['recipe'].rstrip()}"))
    if weights := record["weights"]:
        read = f"{weights['sampled']:,} of {weights['parameters']:,} values in {weights['tensors']} tensors were read"
        parts.append(Text(f"\n{read} ({duration(record['seconds'])})", style="dim"))
    return Group(*parts)


def _table(first: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    from isomerge.reporting.terminal import number

    table = listing(first, *columns.values(), numbers=True)
    for row in rows:
        table.add_row(Text(row["name"]), *(number(row.get(key)) for key in columns))
    return table
