"""`isomerge selftest MODEL`: scramble by random symmetries, compare the outputs, recover the weights."""

from __future__ import annotations

import typer

from isomerge.cli.flags import Level, Model, Seed
from isomerge.cli.output import Voice, as_record
from isomerge.cli.verb import verb


@verb("Show that the symmetries of MODEL are exact.", "isomerge selftest model-a --seed 1")
def selftest(model: Model, *, level: Level = "full", seed: Seed = 0, voice: Voice) -> None:
    """Show that the symmetries of MODEL are exact. Scramble it at random, compare its outputs, align it back.

    Exits with 1 if the function changed: then the architecture's specification is wrong for this model. Also if nothing
    could be measured, which is reported as "not measured" with the reason.
    """
    import isomerge
    from isomerge.reporting.terminal import selftest_table

    with voice.work():
        record = as_record(isomerge.selftest(model, seed=seed, level=level))
    voice.show(record, selftest_table)
    if not record["unchanged"]:
        raise typer.Exit(1)
