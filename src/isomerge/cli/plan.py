"""`isomerge plan`: what a merge would do, from headers only."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice
from isomerge.cli.eval import Kind, Label, Limit, Split, Text
from isomerge.cli.merge import (
    Align,
    Base,
    Data,
    Evidence,
    Fisher,
    Level,
    MaxMemory,
    Method,
    Models,
    Repair,
    Threads,
    Tokenizer,
    Weights,
    flags_of,
)
from isomerge.cli.request import DataFlags, read_request


def plan(
    context: typer.Context,
    models: Models,
    method: Method = None,
    weights: Weights = None,
    align: Align = False,
    level: Level = None,
    base: Base = None,
    data: Data = None,
    split: Split = None,
    limit: Limit = None,
    text: Text = None,
    label: Label = None,
    kind: Kind = None,
    evidence: Evidence = None,
    fisher: Fisher = None,
    repair: Repair = False,
    tokenizer: Tokenizer = None,
    explain: Annotated[
        str | None, typer.Option(metavar="TENSOR", help="Show the inputs and options of one tensor and their origin.")
    ] = None,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say what a merge would do: tensors, bytes, peak memory, time. No weights are read; data is opened, not run."""
    request = read_request([*models, *context.args], flags_of(context))
    with_data = DataFlags(data or (), split, limit, text, label, kind, evidence, fisher, repair)
    documents = request.documents(
        method=method, base=base, weights=weights, align=align, level=level, seed=0, data=with_data,
        tokenizer=tokenizer, example="isomerge plan {}",
    )  # fmt: skip

    from isomerge.merging.api import explain_tensor
    from isomerge.merging.api import plan as plan_merge
    from isomerge.merging.vocabulary.from_recipe import ROWS
    from isomerge.reporting.terminal import explain_table, plan_table

    voice = Voice(json, quiet)
    same_ids = request.recipe is None and tokenizer != ROWS
    with voice.work():
        if explain is not None:
            record = explain_tensor(documents, explain, same_ids=same_ids).to_dict()
        else:
            record = plan_merge(documents, threads=threads, max_memory=max_memory, same_ids=same_ids).to_dict()
    voice.show(record, explain_table if explain is not None else plan_table)
