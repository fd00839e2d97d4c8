"""`isomerge merge`: a recipe, or models and a method, to one model; aligned first when asked."""

from __future__ import annotations

from typing import Annotated

import typer

from isomerge.cli.common import (
    LEVELS,
    Debug,
    Device,
    Force,
    Json,
    MaxMemory,
    Out,
    OutDtype,
    Quiet,
    ShardSize,
    Threads,
    Voice,
    choice,
    reserve_output,
    written_record,
)
from isomerge.cli.request import read_request

Models = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE.yml | A B …", help="A recipe, or models; then the method's options as flags."),
]
Method = Annotated[str | None, typer.Option(help="How to merge; see isomerge list methods. linear if not named.")]
Weights = Annotated[
    str | None, typer.Option("--weights", "--weight", help="One number per model, as in 0.5,0.5; equal if not named.")
]
Base = Annotated[str | None, typer.Option(help="The common ancestor; its config and side files are kept.")]
Align = Annotated[bool, typer.Option("--align", help="Align the models before merging.")]
Level = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(LEVELS), callback=choice("--level", LEVELS), help="What may move when aligning; all if not named."
    ),
]


def merge(
    context: typer.Context,
    models: Models,
    out: Out,
    method: Method = None,
    weights: Weights = None,
    align: Align = False,
    level: Level = None,
    base: Base = None,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    max_memory: MaxMemory = None,
    seed: Annotated[int | None, typer.Option(help="Names the random numbers; the recipe's, or 0.")] = None,
    lock: Annotated[bool, typer.Option("--lock/--no-lock", help="Hash every input and output tensor.")] = True,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write a model card.")] = True,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check what was written.")] = True,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload the result to the hub.")] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Merge models of one architecture into one, as a recipe or flags say.

    A method's options are flags too: --density 0.5, --t 0.3, --lambda 0.8, --no-normalize; with commas, one value for
    each model.
    """
    request = read_request([*models, *context.args], flags_of(context))
    documents = request.documents(method=method, base=base, weights=weights, align=align, level=level, seed=seed)
    references = list(dict.fromkeys(str(r) for d in documents for r in d.referenced_models()))
    reserve_output(out, references, force=force)

    import isomerge
    from isomerge.report.terminal import merge_table

    voice = Voice(json, quiet)
    with voice.work() as progress:
        merged = isomerge.merge_recipe(
            documents, threads=threads, device=device, max_memory=max_memory, seed=seed, progress=progress
        )
        written = merged.save(out, shard_size=shard_size, out_dtype=out_dtype, force=force, lock=lock, report=report)
        record = {**merged.report(), **written_record(written)}
        if verify:
            record["verified"] = merged.verify(written)
        if push:
            from isomerge.checkpoint.push import push as upload

            record["pushed"] = upload(out, push)
    voice.show(record, merge_table)


def flags_of(context: typer.Context) -> list[str]:
    """The verb's own flags, for suggestions."""
    return [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("-")]
