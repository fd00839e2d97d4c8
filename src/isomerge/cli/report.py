"""`isomerge report OUT`: one page that shows what a merge or an alignment did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice

Folder = Annotated[Path, typer.Argument(metavar="OUT", help="A folder that isomerge merge or align has written.")]
Page = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="The page to write; OUT/report.html if not named.")
]
Barrier = Annotated[
    list[Path] | None,
    typer.Option("--barrier", metavar="FILE.json", help="Add this curve or plane: the JSON of isomerge barrier."),
]
NoCurves = Annotated[bool, typer.Option("--no-curves", help="Drop the curves that the page has; else they stay.")]
Open = Annotated[bool, typer.Option("--open", help="Show the page in the browser.")]


def report(
    folder: Folder,
    out: Page = None,
    barrier: Barrier = None,
    no_curves: NoCurves = False,
    open_: Open = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page that shows what was done to OUT: distances, what moved, conflicts, recipe, lineage, lock.

    The page needs no network. merge and align write it by themselves; here it is written again, with curves if wanted:
    those that it has stay, and --barrier adds more.
    """
    from isomerge.reporting.page import report as write
    from isomerge.reporting.terminal import page_table

    voice = Voice(json, quiet)
    with voice.work():
        record = write(folder, out=out, barrier=barrier or (), keep_curves=not no_curves).to_dict()
    if open_ and record["page"]:
        import webbrowser

        webbrowser.open(Path(record["page"]).resolve().as_uri())
    voice.show(record, page_table)


def add_report(record: dict[str, Any], *pages: Path | None) -> None:
    """Say in the record of another verb where its page is: one path, or one for each folder that was written; where
    none could be made, why."""
    written = [page for page in pages if page is not None]
    record["report"] = written if len(pages) > 1 else next(iter(written), None)
    if len(written) < len(pages):
        from isomerge.reporting.page import MISSING

        record["notes"] = [*record.get("notes", ()), MISSING]
