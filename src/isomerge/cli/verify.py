"""`isomerge verify OUT`: is this folder a whole, working model, and the one its lock describes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Json, Quiet, Threads, Voice

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWERS = {True: "yes", False: "NO", None: "-"}


def verify(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a model.")],
    quick: Annotated[bool, typer.Option("--quick", help="Look at headers and side files; read no weights.")] = False,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check that OUT is whole, loads in its stock class, is finite, and is what its lock file says.

    Ends with 1 if anything is wrong. Works on every model folder; without a lock file there is nothing to compare with.
    Where isomerge has written a report, it shows the new answers.
    """
    from isomerge.evaluation.verify import verify as verify_folder
    from isomerge.reporting.page import record_verification

    voice = Voice(json, quiet)
    with voice.work() as progress:
        record = verify_folder(folder, deep=not quick, threads=threads, progress=progress)
        record |= {"report": None, "notes": []}
        try:
            record["report"] = record_verification(folder.expanduser(), record, deep=not quick)
        except Exception as error:  # a folder that may not be written, a broken record: no reason to lose the answer
            record["notes"].append(f"the report was not brought up to date: {error}")
    voice.show(record, verify_table)
    if record["verdict"] != "good":
        raise typer.Exit(1)


def verify_table(record: dict[str, Any]) -> RenderableType:
    """One row per check, and the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("check", "passed", "found"):
        table.add_column(column)
    for check in record["checks"]:
        table.add_row(check["name"], ANSWERS[check["passed"]], Text(check["detail"]))
    verdict = f"{record['folder']} is {record['verdict']} ({record['seconds']:.1f} s)"
    notes = [Text(f"• {note}") for note in record["notes"]]
    return Group(table, Text(verdict, style="bold"), *notes)
