"""`isomerge convert MODEL -o OUT.gguf --type q8_0`: one model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isomerge.choices import GGUF_TYPES
from isomerge.cli.flags import Force, OutDtype, ShardSize, choice, option
from isomerge.cli.output import Voice
from isomerge.cli.request import reserve_output
from isomerge.cli.verb import verb


@verb(
    "Write a model as GGUF, or a quantised one as safetensors.", "isomerge convert model-a -o model-a.gguf --type q8_0"
)
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, hub id, GGUF file, or base+adapter.")],
    *,
    out: Annotated[Path, option("OUT", "A file that ends in .gguf, or the folder to write.", "-o", "--out")],
    type: Annotated[
        str | None, choice("--type", GGUF_TYPES, "How a GGUF file stores matrices; f16 by default.")
    ] = None,
    out_dtype: OutDtype = None,
    shard_size: ShardSize = "5GB",
    force: Force = False,
    voice: Voice,
) -> None:
    """Write MODEL in another format: a GGUF file for llama.cpp, or a folder of safetensors for transformers and MLX.

    Models stored as GGUF, FP8 or MXFP4 are dequantised, a block of rows at a time.
    """
    if out.suffix != ".gguf":
        reserve_output(out, [model], force=force)

    import isomerge
    from isomerge.reporting.terminal import conversion_table

    with voice.work() as progress:
        record = isomerge.convert(
            model, out, type=type, dtype=out_dtype, shard_size=shard_size, force=force, progress=progress
        ).to_dict()
    voice.show(record, conversion_table)
