"""`isomerge merge A B --method linear -o OUT`: one model out of several, aligned first when asked."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import (
    Debug,
    Device,
    Force,
    Json,
    Level,
    MaxMemory,
    Out,
    OutDtype,
    Quiet,
    Seed,
    ShardSize,
    Threads,
    Voice,
    one_of,
    reserve_output,
    written_record,
)
from isomerge.errors import RequestError


def merge(
    models: Annotated[list[str], typer.Argument(metavar="A B", help="Two or more models.")],
    out: Out,
    method: Annotated[str, typer.Option(help="How to merge; see isomerge list methods.")] = "linear",
    weights: Annotated[
        str | None, typer.Option(help="One number per model, as in 0.5,0.5; equal if not named.")
    ] = None,
    align: Annotated[bool, typer.Option("--align", help="Align the models before merging.")] = False,
    level: Level = "full",
    base: Annotated[str | None, typer.Option(help="The common ancestor; its side files are copied.")] = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    max_memory: MaxMemory = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Merge models of one architecture into one. Side files come from the first model unless --base is named."""
    if len(models) < 2:
        raise RequestError("merge needs at least two models, as in isomerge merge model-a model-b -o merged.")
    numbers = _numbers(weights, len(models))
    reserve_output(out, [*models, *([base] if base else [])], force=force)

    import isomerge
    from isomerge.report.terminal import merge_table

    voice = Voice(json, quiet)
    with voice.work() as progress:
        one_of("--method", method, [row["name"] for row in isomerge.catalogue("methods")])
        merged = isomerge.merge(
            models,
            method=method,
            weights=numbers,
            align=align,
            base=base,
            level=level,
            threads=threads,
            device=device,
            max_memory=max_memory,
            seed=seed,
            progress=progress,
        )
        written = merged.save(out, shard_size=shard_size, out_dtype=out_dtype, force=force)
        record = {**merged.report(), **written_record(written)}
    voice.show(record, merge_table)


def _numbers(weights: str | None, count: int) -> list[float] | None:
    """The weights as numbers, one per model.

    >>> _numbers("0.25, 0.75", 2)
    [0.25, 0.75]
    """
    if weights is None:
        return None
    try:
        numbers = [float(part) for part in weights.split(",")]
    except ValueError:
        raise RequestError(f"--weights cannot be '{weights}'. Write numbers with commas, as in 0.5,0.5.") from None
    if len(numbers) != count:
        raise RequestError(f"--weights has {len(numbers)} numbers for {count} models. Write one for each, in order.")
    return numbers
