"""`isomerge list methods|architectures|solvers`: what is there to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice, choice
from isomerge.cli.completion import offer

KINDS = ("methods", "architectures", "solvers")


def list_(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(KINDS), autocompletion=offer(KINDS), callback=choice("list", KINDS))
    ],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List methods, architectures or solvers, one line each."""
    import isomerge
    from isomerge.reporting.terminal import catalogue_table

    voice = Voice(json, quiet)
    with voice.work():
        record = {kind: isomerge.catalogue(kind)}
    voice.show(record, catalogue_table)
