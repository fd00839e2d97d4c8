"""`isomerge report OUT`: one page that shows what a merge or an alignment did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isomerge.cli.flags import option, switch
from isomerge.cli.output import Record, Voice, as_record
from isomerge.cli.verb import verb


@verb("Write one HTML page that shows what was done to OUT.", "isomerge report merged --barrier curve.json --open")
def report(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that isomerge merge or align has written.")],
    *,
    out: Annotated[Path | None, option("FILE", "The page to write; OUT/report.html by default.", "-o", "--out")] = None,
    barrier: Annotated[
        list[Path] | None,
        option("FILE.json", "Add this curve or plane, printed by isomerge barrier --json.", "--barrier"),
    ] = None,
    no_curves: Annotated[bool, switch("--no-curves", "Remove the curves that the page has.")] = False,
    open_: Annotated[bool, switch("--open", "Open the page in the browser.")] = False,
    voice: Voice,
) -> None:
    """Write one HTML page that shows what was done to OUT: distances, what moved, conflicts, recipe, lineage, lock.

    The page needs no network. merge and align write it too; this verb writes it again and can add curves, beside
    those that the page already has.
    """
    from isomerge.reporting.page import report as write
    from isomerge.reporting.terminal import page_table

    with voice.work():
        record = as_record(write(folder, out=out, barrier=barrier or (), keep_curves=not no_curves))
    if open_ and record["page"]:
        import webbrowser

        webbrowser.open(Path(record["page"]).resolve().as_uri())
    voice.show(record, page_table)


def add_report(record: Record, *pages: Path | None) -> None:
    """Add to another verb's record where its page is (one path, or one per folder written), or why there is none."""
    written = [page for page in pages if page is not None]
    record["report"] = written if len(pages) > 1 else next(iter(written), None)
    if len(written) < len(pages):
        from isomerge.reporting.page import MISSING

        record["notes"] = [*record.get("notes", ()), MISSING]
