"""`isomerge demo`: tiny models on real data, from training to merged models and their report, in half a minute."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice
from isomerge.cli.errors import announce_output
from isomerge.cli.report import add_report

if TYPE_CHECKING:
    from isomerge.cli.progress import Progress

Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write models and report.")]
Force = Annotated[bool, typer.Option("--force", help="Write into DIR though other things are in it.")]


def demo(
    out: Out = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="How many pairs of models to train.")] = 1,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train three tiny models on real digits, merge them in every way, and show what came of it.

    Half a minute on two cores, no network. Ends with a table and the path of an HTML report.
    """
    announce_output(out)

    import isomerge
    from isomerge.reporting.terminal import demo_table
    from isomerge.results import plain

    voice = Voice(json, quiet)
    watched = not (json or quiet) and sys.stderr.isatty()
    with contextlib.redirect_stdout(sys.stderr), _stages() if watched else contextlib.nullcontext() as progress:
        record = dict(plain(isomerge.demo(out, seeds=seeds, force=force, progress=progress)))
    if record.get("report", "") is None:
        add_report(record, None)
    voice.show(record, demo_table)


@contextlib.contextmanager
def _stages() -> Iterator[Progress]:
    """One bar for each stage on stderr. Finished ones stay to be seen: in a demo the way is part of the result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )  # fmt: skip
    with RichProgress(*columns, console=Console(stderr=True)) as shown:
        rows: dict[str, Any] = {}

        def finish() -> None:
            for row in shown.tasks:
                shown.update(row.id, completed=row.total, detail="")

        def update(done: int, total: int, what: str) -> None:
            stage, _, detail = what.partition(": ")
            if stage not in rows:
                finish()
                rows[stage] = shown.add_task(stage, total=total, detail=detail)
            shown.update(rows[stage], completed=done, detail=detail)

        yield update
        finish()
