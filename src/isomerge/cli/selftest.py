"""`isomerge selftest MODEL`: scramble by random symmetries, show the function is unchanged, recover the weights."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import Debug, Json, Level, Quiet, Seed, Voice
from isomerge.results import plain


def selftest(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a file or a hub id.")],
    level: Level = "full",
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show that the symmetries of MODEL are exact. Scramble it at random, compare its outputs, align it back.

    Ends with 1 if the function did change: then the architecture's specification is wrong for this model.
    """
    import isomerge
    from isomerge.reporting.terminal import selftest_table

    voice = Voice(json, quiet)
    with voice.work():
        record = plain(isomerge.selftest(model, seed=seed, level=level))
    voice.show(record, selftest_table)
    if not record["unchanged"]:
        raise typer.Exit(1)
