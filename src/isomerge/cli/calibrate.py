"""`isomerge calibrate MODEL --data PATH -o FILE`: what data show of a model, for merges that use it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Device, Force, Json, Quiet, Seed, Voice, choice, one_of
from isomerge.cli.eval import BatchSize, Kind, Label, Length, Limit, Split, Text
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

WHAT = ("gram", "activations", "units", "fisher")
FISHER = ("true", "empirical")


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a file or a hub id.")],
    data: Annotated[Path, typer.Option(metavar="PATH", help="Images in folders or an archive; texts, tables, CoNLL.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The safetensors file to write.")],
    what: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Any of gram (inputs of linear maps, for regmean), fisher (for fisher and ewc), units (for repair), "
            "activations (of every space); several with commas.",
        ),
    ] = "gram",
    fisher: Annotated[
        str,
        typer.Option(
            metavar="|".join(FISHER),
            callback=choice("--fisher", FISHER),
            help="Labels as the model predicts them, or the labels of the data.",
        ),
    ] = "true",
    samples: Annotated[int, typer.Option(min=1, help="Draws per example where labels are too many to sum over.")] = 1,
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="Only weights whose name contains this.")] = None,
    split: Split = None,
    text: Text = None,
    label: Label = None,
    kind: Kind = None,
    length: Length = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = "cpu",
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure MODEL on data, and write the sums that regmean, fisher, repair and alignment can use."""
    wanted = [one_of("--what", part.strip(), WHAT) for part in what.split(",")]
    if out.is_dir() or (out.exists() and not force):
        raise RequestError(f"Writing the statistics: {out} is already there. Name another file, or add --force.")
    if out.suffix != ".safetensors":
        raise RequestError(
            f"Writing the statistics {out}: they are a .safetensors file. Name it so, as in stats.safetensors."
        )
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise RequestError(f"Writing the statistics {out}: nothing may be written into {place}. Name another folder.")

    from isomerge.calibration import calibrate as measure
    from isomerge.data import open_data
    from isomerge.running.passes import BATCH_SIZE

    start = time.perf_counter()
    voice = Voice(json, quiet)
    with voice.work("steps") as progress:
        opened = open_data(data, kind=kind, split=split, text=text, label=label, length=length, limit=limit)
        found = measure(
            model,
            opened,
            what=wanted,
            fisher=fisher,
            samples=samples,
            only=only,
            device=device,
            batch_size=batch_size or BATCH_SIZE,
            seed=seed,
            progress=progress,
        )
        found.save(out)
    record = {
        "out": str(out),
        "bytes": out.stat().st_size,
        **found.to_dict(),
        "seconds": time.perf_counter() - start,
    }
    voice.show(record, calibrate_table)


def calibrate_table(record: dict[str, Any]) -> RenderableType:
    """What was measured on what, and where it is."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    table = Table(box=None, pad_edge=False, show_header=False)
    for key in ("model", "data", "examples", "what", "linear_maps", "sites", "out"):
        value = record[key]
        if value:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            table.add_row(Words(key.replace("_", " "), style="dim"), Words(shown))
    return Group(table, *(Words(f"note: {note}") for note in record["notes"]))
