"""`isomerge list methods|architectures|solvers|combinations [NAME]`: what is there to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.choices import CATALOGUES, method_options, methods
from isomerge.cli.flags import offer, one_of
from isomerge.cli.output import Voice
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


def _catalogue(given: str) -> str:
    if given not in CATALOGUES and given in methods():
        raise RequestError(f"list cannot be '{given}', which is a method: isomerge list methods {given}.")
    return one_of("list", given, CATALOGUES)


KIND = typer.Argument(metavar="|".join(CATALOGUES), autocompletion=offer(CATALOGUES), callback=_catalogue)


@verb("List methods, architectures, solvers or combinations.", "isomerge list architectures")
def list_(
    kind: Annotated[str, KIND],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show all there is to know of this one.")] = None,
    *,
    voice: Voice,
) -> None:
    """List methods, architectures, solvers or combinations of predictions, one line each; with a name, the details:
    isomerge list methods ties."""
    import isomerge
    from isomerge.reporting.terminal import catalogue_table, entry_table

    with voice.work():
        rows = isomerge.catalogue(kind)
    if name is None:
        voice.show({kind: rows}, catalogue_table)
        return
    one_of(kind.removesuffix("s"), name, [row.name for row in rows])
    record = next(row for row in rows if row.name == name).to_dict()
    if kind == "methods":
        record["options"] = [vars(option) | {"meaning": option.meaning} for option in method_options(name)]
    voice.show(record, entry_table)
