"""`isomerge extract BASE FINETUNED --rank 16 -o OUT`: what fine-tuning added to a model, as a LoRA adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import Debug, Force, Json, Out, Quiet, Voice, reserve_output

DEFAULT_RANK = 16


def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that was fine-tuned.")],
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="What became of it.")],
    out: Out,
    rank: Annotated[
        int | None, typer.Option(min=1, help=f"The most a layer may have; {DEFAULT_RANK} unless --energy is named.")
    ] = None,
    energy: Annotated[
        float | None, typer.Option(help="Give each layer the rank that keeps this share of its squared change: 0.99.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only layers whose name ends so, as in 'q_proj|v_proj'.")
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the best low-rank adapter for what FINETUNED adds to BASE, and say how much of it is missed."""
    reserve_output(out, [base, finetuned], force=force)

    from isomerge.adapters.extract import extract as extract_adapter
    from isomerge.reporting.terminal import adapter_table

    voice = Voice(json, quiet)
    with voice.work() as progress:
        record = extract_adapter(
            base, finetuned, out, rank=rank, energy=energy, targets=targets, force=force, progress=progress
        ).to_dict()
    voice.show(record, adapter_table)
