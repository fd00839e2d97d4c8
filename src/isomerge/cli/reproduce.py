"""`isomerge reproduce OUT`: make a model again from its lock file and compare hashes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Force, Json, Quiet, Threads, Voice, reserve_output

if TYPE_CHECKING:
    from rich.console import RenderableType


def reproduce(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder with an isomerge.lock.json.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="NEW", help="Keep the new copy in this folder.")
    ] = None,
    threads: Threads = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make OUT again from the recipe and inputs its lock file names, and compare every hash.

    Ends with 0 if the two are identical. OUT itself is not touched; the new copy is removed unless -o names a folder.
    """
    from isomerge.checkpoint.lock import read_lock
    from isomerge.merging.reproduce import reproduce as make_again

    inputs = [entry.source for entry in read_lock(folder).inputs]
    if out is not None:
        reserve_output(out, [str(folder), *inputs], force=force)

    voice = Voice(json, quiet)
    with voice.work("both") as progress:
        record = make_again(folder, out=out, threads=threads, force=force, progress=progress).to_dict()
    voice.show(record, reproduce_table)
    if record["verdict"] != "identical":
        raise typer.Exit(1)


def reproduce_table(record: dict[str, Any]) -> RenderableType:
    """The verdict, what differs, and the notes."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"{record['folder']}: {record['verdict']} ({record['seconds']:.1f} s)"]
    lines += [f"input {entry['reference']}: {'; '.join(entry['changed'])}" for entry in record["inputs"]]
    lines += [*record["differences"], *record["notes"]]
    if record["sha256"]:
        lines.append(f"sha256 {record['sha256']}, expected {record['expected_sha256']}")
    if record["out"]:
        lines.append(f"written {record['out']}")
    return Group(Text(lines[0], style="bold"), *(Text(f"• {line}") for line in lines[1:]))
