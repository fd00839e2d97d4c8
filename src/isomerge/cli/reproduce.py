"""`isomerge reproduce OUT`: rebuild a model from its lock file and compare hashes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isomerge.cli.flags import Force, Threads, option
from isomerge.cli.output import Record, Voice, as_record
from isomerge.cli.request import reserve_output
from isomerge.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb("Rebuild OUT from its lock file and compare hashes.", "isomerge reproduce merged")
def reproduce(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder with an isomerge.lock.json.")],
    *,
    out: Annotated[Path | None, option("NEW", "Keep the new copy in this folder.", "-o", "--out")] = None,
    threads: Threads = None,
    force: Force = False,
    voice: Voice,
) -> None:
    """Rebuild OUT from the recipe and inputs in its lock file, and compare every hash.

    Exits with 0 if the two are identical. OUT is not changed; the new copy is removed unless -o names a folder.
    """
    from isomerge.checkpoint.lock import read_lock
    from isomerge.merging.reproduce import reproduce as rebuild

    inputs = [entry.source for entry in read_lock(folder).inputs]
    if out is not None:
        reserve_output(out, [str(folder), *inputs], force=force)

    with voice.work("both") as progress:
        record = as_record(rebuild(folder, out=out, threads=threads, force=force, progress=progress))
    voice.show(record, reproduce_table)
    if record["verdict"] != "identical":
        raise typer.Exit(1)


def reproduce_table(record: Record) -> RenderableType:
    """The verdict, what differs, and the notes."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import duration

    lines = [f"input {entry['reference']}: {'; '.join(entry['changed'])}" for entry in record["inputs"]]
    lines += [*record["differences"], *record["notes"]]
    if record["sha256"]:
        lines.append(f"sha256 {record['sha256']}, expected {record['expected_sha256']}")
    if record["out"]:
        lines.append(f"written {record['out']}")
    verdict = f"{record['folder']}: {record['verdict']} ({duration(record['seconds'])})"
    return Group(Text(verdict, style="bold"), *(Text(f"• {line}") for line in lines))
