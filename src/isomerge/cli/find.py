"""`isomerge find QUERY MODELS…`: which of many models is likely to be useful, and the best of them merged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import FIND_BY
from isomerge.cli.flags import Force, Reading, Running, choice, data_source, option
from isomerge.cli.merge import finished
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.request import reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Rank models by how useful they are likely to be on data.",
    "isomerge find images.tar.xz model-a model-b model-c --merge 2 -o merged",
)
def find(
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="Data like that on which the model would be used.")],
    models: Annotated[
        list[str], typer.Argument(metavar="MODELS …", help="Models, descriptions, and folders that hold them.")
    ],
    *,
    by: Annotated[str, choice("--by", FIND_BY, "What to rank by.")] = "auto",
    merge: Annotated[int | None, option("K", "Merge the best K models into --out.", "--merge", min=2)] = None,
    method: Annotated[str | None, option("NAME", "How to merge them; linear by default.")] = None,
    base: Annotated[str | None, option("MODEL", "Their common ancestor, for methods that need one.")] = None,
    out: Annotated[Path | None, option("OUT", "The folder to write the merge to.", "-o", "--out")] = None,
    reading: Reading,
    running: Running,
    force: Force = False,
    voice: Voice,
) -> None:
    """Rank models by how useful they are likely to be on QUERY. Nothing is trained.

    Descriptions, as isomerge describe writes them, are compared with QUERY; classifiers at hand are run on it.
    """
    if (merge is None) != (out is None) or (merge is None and (method or base)):
        raise RequestError(
            "find merges the best models if it is told how many and where to write them: --merge 3 -o merged; --method "
            "and --base belong to it."
        )
    if out is not None:
        reserve_output(out, [*models, str(query), *([base] if base else [])], force=force)

    import isomerge

    with voice.work("steps") as progress:
        found = isomerge.find(
            data_source(query, reading, running), models, by=by, batch_size=running.batch_size, limit=reading.limit,
            seed=running.seed, device=running.device, progress=progress,
        )  # fmt: skip
        record: dict[str, Any] = {**as_record(found), "merged": None}
        if merge is not None and out is not None:
            merged = isomerge.merge(
                found.best(merge), method=method or "linear", base=base, device=running.device, seed=running.seed,
                progress=progress,
            )  # fmt: skip
            written = merged.save(out, force=force, finish=False)
            record["merged"] = finished(merged, written, verify=True, report=True)
            written.finish()
    voice.show(record, find_table)


def find_table(record: Record) -> RenderableType:
    """One row per model, the most useful first, and what was merged."""
    from rich.text import Text

    columns = ("distance", "covered", "leep", "logme", "certainty")
    shown = [name for name in columns if any(row[name] is not None for row in record["models"])]
    table = listing("", "model", *shown)
    for place, row in enumerate(record["models"], start=1):
        table.add_row(Text(str(place)), Text(row["name"]), *(Text(number(row[name])) for name in shown))
    lines = [f"ranked by {record['by']} on {record['examples']} examples of {record['data']['name']}"]
    if record.get("merged"):
        lines.append(f"the first {len(record['merged']['models'])} were merged into {record['merged']['out']}")
    return below(table, *lines, *ending(record))
