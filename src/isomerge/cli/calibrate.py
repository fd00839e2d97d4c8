"""`isomerge calibrate MODEL --data PATH -o FILE`: statistics of a model on data, for merges that use them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isomerge.choices import FISHER_KINDS, STATISTICS
from isomerge.cli.flags import Force, Model, Reading, Running, choice, data_source, one_of, option
from isomerge.cli.output import Record, Voice, below, listing
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Write statistics on data that merging and alignment use.",
    "isomerge calibrate model-a --data images.tar.xz --limit 2000 -o statistics.safetensors",
)
def calibrate(
    model: Model,
    *,
    data: Annotated[Path, option("PATH", "Images in folders or an archive; texts, tables, CoNLL.")],
    out: Annotated[Path, option("FILE", "The safetensors file to write.", "-o", "--out")],
    what: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Any of gram (inputs of linear maps, for regmean and esm), fisher (for fisher and ewc), units (for "
            "repair), activations (of every space); several with commas.",
        ),
    ] = "gram",
    fisher: Annotated[
        str, choice("--fisher", FISHER_KINDS, "Labels drawn from the model's predictions (true), or those of the data.")
    ] = "true",
    samples: Annotated[int, option("N", "Draws per example if there are too many labels to sum over.", min=1)] = 1,
    only: Annotated[str | None, option("PATTERN", "Only weights whose name contains this.")] = None,
    reading: Reading,
    running: Running,
    force: Force = False,
    voice: Voice,
) -> None:
    """Run data through MODEL and write the statistics that regmean, fisher, repair and alignment can use."""
    wanted = [one_of("--what", part.strip(), STATISTICS) for part in what.split(",")]
    _require_writable(out, force=force)

    from isomerge.calibration import calibrate as measure
    from isomerge.running.passes import BATCH_SIZE

    start = time.perf_counter()
    with voice.work("steps") as progress:
        statistics = measure(
            model, data_source(data, reading, running), what=wanted, fisher=fisher, samples=samples, only=only,
            device=running.device, batch_size=running.batch_size or BATCH_SIZE, seed=running.seed, progress=progress,
        )  # fmt: skip
        statistics.save(out)
    record = {
        "out": str(out),
        "bytes": out.stat().st_size,
        **statistics.to_dict(),
        "seconds": time.perf_counter() - start,
    }
    voice.show(record, calibrate_table)


def _require_writable(out: Path, *, force: bool) -> None:
    if out.is_dir() or (out.exists() and not force):
        raise RequestError(f"Writing the statistics: {out} already exists. Name another file, or add --force.")
    if out.suffix != ".safetensors":
        raise RequestError(
            f"Writing the statistics {out}: they are a .safetensors file. Name it like stats.safetensors."
        )
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise RequestError(f"Writing the statistics {out}: {place} is not a writable folder. Name another folder.")


def calibrate_table(record: Record) -> RenderableType:
    """What was measured on what, and where it is."""
    from rich.text import Text

    table = listing(header=False)
    for key in ("model", "data", "examples", "what", "linear_maps", "sites", "out"):
        if value := record[key]:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            table.add_row(Text(key.replace("_", " "), style="dim"), Text(shown))
    return below(table, *(f"note: {note}" for note in record["notes"]))
