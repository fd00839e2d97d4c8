"""`isomerge plan`: what a merge would do, from headers only."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.flags import DataFlags, MergeFlags, MergeMemory, Models, Reading, Threads, option
from isomerge.cli.output import Voice
from isomerge.cli.request import read_request
from isomerge.cli.verb import verb


@verb(
    "Show what a merge would do: tensors, bytes, memory, time.",
    "isomerge plan recipe.yml --explain model.layers.0.mlp.up_proj.weight",
    method_options=True,
)
def plan(
    context: typer.Context,
    models: Models,
    *,
    merging: MergeFlags,
    data_use: DataFlags,
    reading: Reading,
    explain: Annotated[
        str | None, option("TENSOR", "Show the inputs and options of one tensor and their origin.")
    ] = None,
    threads: Threads = None,
    max_memory: MergeMemory = None,
    voice: Voice,
) -> None:
    """Show what a merge would do: tensors, bytes, peak memory, time. Reads no weights; data is opened but not run."""
    request = read_request(models, context)
    documents = request.documents(merging, reading, data_use, seed=0, example="isomerge plan {}")

    from isomerge.merging.api import explain_tensor
    from isomerge.merging.api import plan as plan_merge
    from isomerge.reporting.terminal import explain_table, plan_table

    same_ids = request.recipe is None and merging.same_ids
    with voice.work():
        if explain is not None:
            record = explain_tensor(documents, explain, same_ids=same_ids).to_dict()
        else:
            record = plan_merge(documents, threads=threads, max_memory=max_memory, same_ids=same_ids).to_dict()
    voice.show(record, explain_table if explain is not None else plan_table, timed=False)
