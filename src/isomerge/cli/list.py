"""`isomerge list methods|architectures|solvers`: what is there to choose from."""

from __future__ import annotations

from typing import Annotated

from isomerge.choices import CATALOGUES
from isomerge.cli.flags import choice
from isomerge.cli.output import Voice
from isomerge.cli.verb import verb


@verb("List methods, architectures or solvers, one line each.", "isomerge list architectures")
def list_(kind: Annotated[str, choice("list", CATALOGUES, argument=True)], *, voice: Voice) -> None:
    """List methods, architectures or solvers, one line each."""
    import isomerge
    from isomerge.reporting.terminal import catalogue_table

    with voice.work():
        record = {kind: isomerge.catalogue(kind)}
    voice.show(record, catalogue_table)
