"""`isomerge extract BASE FINETUNED --rank 16 -o OUT`: what fine-tuning added to a model, as a LoRA adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.choices import DEFAULT_RANK
from isomerge.cli.flags import Force, Out, option
from isomerge.cli.output import Voice
from isomerge.cli.request import reserve_output
from isomerge.cli.verb import verb


@verb(
    "Write what FINETUNED adds to BASE as a low-rank adapter.", "isomerge extract base finetuned --rank 16 -o adapter"
)
def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that was fine-tuned.")],
    finetuned: Annotated[str, typer.Argument(metavar="FINETUNED", help="The fine-tuned model.")],
    *,
    out: Out,
    rank: Annotated[
        int | None, option("R", f"Largest rank of a layer; {DEFAULT_RANK} unless --energy is given.", min=1)
    ] = None,
    energy: Annotated[
        float | None, option("SHARE", "Give each layer the rank that keeps this share of its squared change.")
    ] = None,
    targets: Annotated[str | None, option("PATTERN", "Only layers whose name ends so, as in 'q_proj|v_proj'.")] = None,
    force: Force = False,
    voice: Voice,
) -> None:
    """Write the best low-rank adapter for what FINETUNED adds to BASE, and report how much of it is missed."""
    reserve_output(out, [base, finetuned], force=force)

    from isomerge.adapters.extract import extract as extract_adapter
    from isomerge.reporting.terminal import adapter_table

    with voice.work() as progress:
        record = extract_adapter(
            base, finetuned, out, rank=rank, energy=energy, targets=targets, force=force, progress=progress
        ).to_dict()
    voice.show(record, adapter_table)
