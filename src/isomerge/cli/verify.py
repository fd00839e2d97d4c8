"""`isomerge verify OUT`: is this folder a complete, working model, and the one its lock file describes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isomerge.cli.flags import Threads, switch
from isomerge.cli.output import Record, Voice, as_record, listing
from isomerge.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWERS = {True: "yes", False: "NO", None: "-"}


@verb("Check that OUT is complete, loads, and matches its lock file.", "isomerge verify merged")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a model.")],
    *,
    quick: Annotated[bool, switch("--quick", "Check headers and side files only.")] = False,
    threads: Threads = None,
    voice: Voice,
) -> None:
    """Check that OUT is complete, loads in its stock class, is finite, and matches its lock file.

    Exits with 1 if anything is wrong. Works on every model folder; without a lock file there are no hashes to compare.
    If isomerge has written a report, it is updated.
    """
    from isomerge.evaluation.verify import verify as verify_folder
    from isomerge.reporting.page import record_verification

    with voice.work() as progress:
        record = as_record(verify_folder(folder, deep=not quick, threads=threads, progress=progress))
        record |= {"report": None, "notes": []}
        try:
            record["report"] = record_verification(folder.expanduser(), record, deep=not quick)
        except Exception as error:  # a read-only folder, a broken record: no reason to lose the answer
            record["notes"].append(f"the report was not updated: {error}")
    voice.show(record, verify_table)
    if record["verdict"] != "good":
        raise typer.Exit(1)


def verify_table(record: Record) -> RenderableType:
    """One row per check, and the verdict."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import duration

    table = listing("check", "passed", "found")
    for check in record["checks"]:
        table.add_row(check["name"], ANSWERS[check["passed"]], Text(check["detail"]))
    verdict = f"{record['folder']} is {record['verdict']} ({duration(record['seconds'])})"
    return Group(table, Text(verdict, style="bold"), *(Text(f"• {note}") for note in record["notes"]))
