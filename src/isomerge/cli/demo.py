"""`isomerge demo`: tiny models on real data, from training to the merged model, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice
from isomerge.cli.errors import announce_output


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write the models.")] = Path(
        "demo-out"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="How many pairs of models to train.")] = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Align and merge two tiny models made on the spot.

    Trains small image classifiers from different seeds and averages them with and without alignment.
    """
    announce_output(out)

    import isomerge
    from isomerge.report.terminal import demo_table

    voice = Voice(json, quiet)
    with voice.work(unit="steps") as progress:
        record = isomerge.demo(out, seeds=seeds, progress=progress)
    voice.show(record, demo_table)
