"""`isomerge demo`: tiny models on real data, from training to merged models and their report, in half a minute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from isomerge.cli.flags import option, switch
from isomerge.cli.interruption import announce_output
from isomerge.cli.output import Progress, Voice, as_record
from isomerge.cli.report import add_report
from isomerge.cli.verb import verb


@verb("Train tiny models, merge them in every way, show the results.", "isomerge demo -o demo-out --seeds 5")
def demo(
    *,
    out: Annotated[Path, option("DIR", "Where to write models and report.", "-o", "--out")] = Path("demo-out"),
    seeds: Annotated[int, option("N", "How many pairs of models to train.", min=1)] = 1,
    force: Annotated[bool, switch("--force", "Write into DIR although it holds other files.")] = False,
    voice: Voice,
) -> None:
    """Train three tiny models on real digits, merge them in every way, and show the results.

    Takes half a minute on two cores, without network. Prints a table and the path of an HTML report.
    """
    announce_output(out)

    import isomerge
    from isomerge.reporting.terminal import demo_table

    with voice.work(bar=_stages) as progress:
        record = as_record(isomerge.demo(out, seeds=seeds, force=force, progress=progress))
    if record.get("report", "") is None:
        add_report(record, None)
    voice.show(record, demo_table)


@contextlib.contextmanager
def _stages(unit: str = "steps") -> Iterator[Progress]:
    """One bar for each stage on stderr. Finished ones stay: in a demo the steps are part of the result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
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
