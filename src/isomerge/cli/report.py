"""`isomerge report OUT`: one page that shows what a merge or an alignment did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isomerge.addresses import is_url
from isomerge.cli.flags import option, switch
from isomerge.cli.output import Record, Voice, as_record
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


@verb("Write one HTML page that shows what was done to OUT.", "isomerge report merged --measured curve.json --open")
def report(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that isomerge merge or align has written.")],
    *,
    out: Annotated[Path | None, option("FILE", "The page to write; OUT/report.html by default.", "-o", "--out")] = None,
    measured: Annotated[
        list[Path] | None,
        option(
            "FILE.json",
            "Add what isomerge eval, barrier, curve or sweep printed with --json.",
            "--measured",
            "--barrier",
        ),
    ] = None,
    no_curves: Annotated[bool, switch("--no-curves", "Remove the scores and curves that the page has.")] = False,
    open_: Annotated[bool, switch("--open", "Open the page in the browser.")] = False,
    voice: Voice,
) -> None:
    """Write one HTML page on OUT: a verdict, what was measured, distances, what moved, recipe, lineage, lock.

    The page needs no network. merge and align write it too; this verb writes it again and can add scores and curves,
    beside those that the page already has. eval*.json, barrier*.json, curve*.json and sweep*.json in OUT are read
    without being named.
    """
    if is_url(folder):
        raise RequestError("The page is written beside a model in a folder, and OUT is an address. Name a folder.")
    from isomerge.reporting.page import report as write
    from isomerge.reporting.terminal import page_table

    with voice.work():
        record = as_record(write(folder, out=out, measured=measured or (), keep_curves=not no_curves))
    if open_ and record["page"]:
        import webbrowser

        webbrowser.open(Path(record["page"]).resolve().as_uri())
    voice.show(record, page_table)


def add_report(record: Record, *pages: Path | None) -> None:
    """Add to another verb's record where its page is (one path, or one per folder written), or why there is none."""
    written = [page for page in pages if page is not None]
    record["report"] = written if len(pages) > 1 else next(iter(written), None)
    if len(written) < len(pages):
        from isomerge.reporting.page import why_no_page

        record["notes"] = [*record.get("notes", ()), why_no_page()]
