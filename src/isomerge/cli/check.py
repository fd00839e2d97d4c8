"""`isomerge check A B`: can these be merged, would alignment help, what to try."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice
from isomerge.errors import RequestError


def check(
    models: Annotated[list[str], typer.Argument(metavar="A B", help="Two or more models.")],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say whether models fit together. Takes seconds.

    Also: siblings or strangers, how far apart they are, whether alignment would help and what to try.
    """
    if len(models) < 2:
        raise RequestError("check compares models: name at least two, as in isomerge check model-a model-b.")

    import isomerge
    from isomerge.report.terminal import check_table

    voice = Voice(json, quiet)
    with voice.work():
        record = isomerge.check(*models)
    voice.show(record, check_table)
