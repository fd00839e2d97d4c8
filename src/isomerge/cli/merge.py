"""`isomerge merge`: a recipe, or models and a method, to one model; aligned first when asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from isomerge.cli.align import EVIDENCE
from isomerge.cli.calibrate import FISHER
from isomerge.cli.common import (
    LEVELS,
    Debug,
    Force,
    Json,
    Out,
    OutDtype,
    Quiet,
    ShardSize,
    Voice,
    choice,
    readable,
    reserve_output,
    written_record,
)
from isomerge.cli.completion import complete_method, offer
from isomerge.cli.eval import Kind, Label, Limit, Split, Text
from isomerge.cli.heap import keep_freed_memory
from isomerge.cli.report import add_report
from isomerge.cli.request import DataFlags, Request, numbers, read_request, typed_options
from isomerge.errors import RequestError, did_you_mean

Threads = Annotated[int | None, typer.Option(min=1, help="How many tensors at once; all cores if not named.")]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=readable("--max-memory", "parse_size"),
        help="Use no more workers than fit into this; an error where one does not.",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE.yml | A B …", help="A recipe, or models; then the method's options as flags."),
]
Method = Annotated[
    str | None,
    typer.Option(autocompletion=complete_method, help="How to merge; see isomerge list methods. linear if not named."),
]
Weights = Annotated[
    str | None, typer.Option("--weights", "--weight", help="One number per model, as in 0.5,0.5; equal if not named.")
]
Base = Annotated[str | None, typer.Option(help="The common ancestor; its config and side files are kept.")]
TOKENIZERS = ("union", "base", "rows")


def _known_tokenizer(given: str | None) -> str | None:
    """Refuse, before any work, a word that is neither known nor a folder nor a hub id."""
    if given is None or given in TOKENIZERS or "/" in given or Path(re.split("[@+]", given)[0]).expanduser().exists():
        return given
    raise RequestError(f"--tokenizer cannot be '{given}': there is no such model. {did_you_mean(given, TOKENIZERS)}")


Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="union|base|MODEL|rows",
        autocompletion=offer(TOKENIZERS),
        callback=_known_tokenizer,
        help="Match tokens by their text: the result has all (union), the base's, or this model's. With rows, merge "
        "row by row although ids differ.",
    ),
]
Align = Annotated[bool, typer.Option("--align", help="Align the models before merging.")]
Level = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(LEVELS),
        autocompletion=offer(LEVELS),
        callback=choice("--level", LEVELS),
        help="What may move when aligning; all if not named.",
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Images or texts to run the models on; once for all models, or once for each in their order.",
    ),
]
Evidence = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(EVIDENCE),
        autocompletion=offer(EVIDENCE),
        callback=choice("--evidence", EVIDENCE),
        help="What --align goes by; with --data, activations for the residual stream and weights elsewhere.",
    ),
]
Fisher = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(FISHER),
        autocompletion=offer(FISHER),
        callback=choice("--fisher", FISHER),
        help="How Fisher information is measured: labels as a model predicts them (true), or those of --data.",
    ),
]
Repair = Annotated[
    bool, typer.Option("--repair", help="Then give the units the mean and spread they have in the models, on --data.")
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
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
    threads: Threads = None,
    max_memory: MaxMemory = None,
    seed: Annotated[int | None, typer.Option(help="Names the random numbers; the recipe's, or 0.")] = None,
    lock: Annotated[bool, typer.Option("--lock/--no-lock", help="Hash every input and output tensor.")] = True,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write a model card and report.html.")] = True,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check what was written.")] = True,
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
    rank: Annotated[int | None, typer.Option(min=1, help="When adapters are merged: the rank of the result.")] = None,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload the result to the hub.")] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Merge models of one architecture into one, as a recipe or flags say.

    A method's options are flags too: --density 0.5, --t 0.3, --lambda 0.8, --no-normalize; with commas, one value for
    each model. Models with different tokenizers: isomerge merge A B --tokenizer union -o OUT.
    """
    request = read_request([*models, *context.args], flags_of(context))
    with_data = DataFlags(data or (), split, limit, text, label, kind, evidence, fisher, repair)
    if request.are_adapters:
        _refuse(
            {"--align": align, "--level": level, "--out-dtype": out_dtype, "--max-memory": max_memory,
             "--shard-size": shard_size != "5GB", "--device": device != "cpu", "--threads": threads, "--push": push,
             "--tokenizer": tokenizer, **with_data.flags()},
            "when adapters are merged into one",
        )  # fmt: skip
        reserve_output(out, request.models, force=force)
        _merge_adapters(request, out, method, weights, base, rank, seed or 0, report, force, Voice(json, quiet))
        return
    if rank is not None:
        raise RequestError("--rank is of merged adapters, and models are named. Leave it out, or see isomerge extract.")
    if push:
        from isomerge.checkpoint.push import require_access

        require_access(push)
    documents = request.documents(
        method=method, base=base, weights=weights, align=align, level=level, seed=seed, data=with_data,
        tokenizer=tokenizer,
    )  # fmt: skip
    references = list(dict.fromkeys(str(r) for d in documents for r in d.referenced_models()))
    reserve_output(out, [*references, *map(str, with_data.paths)], force=force)

    import isomerge
    from isomerge.merging.tokens import ROWS
    from isomerge.reporting.terminal import merge_table

    keep_freed_memory()
    voice = Voice(json, quiet)
    with voice.work("both") as progress:
        merged = isomerge.merge_recipe(
            documents, threads=threads, device=device, max_memory=max_memory, seed=seed,
            same_ids=request.recipe is None and tokenizer != ROWS, progress=progress,
        )  # fmt: skip
        written = merged.save(out, shard_size=shard_size, out_dtype=out_dtype, force=force, lock=lock, report=report)
        record = {**merged.report(), **written_record(written)}
        if verify:
            record["verified"] = merged.verify(written)
        if report:
            add_report(record, merged.write_report(written))
        if push:
            from isomerge.checkpoint.push import push as upload

            record["pushed"] = upload(out, push, quiet=json or quiet)
    voice.show(record, merge_table)


def _refuse(flags: dict[str, object], when: str) -> None:
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise RequestError(f"{', '.join(given)} has no effect {when}. Leave it out.")


def _merge_adapters(
    request: Request,
    out: Path,
    method: str | None,
    weights: str | None,
    base: str | None,
    rank: int | None,
    seed: int,
    report: bool,
    force: bool,
    voice: Voice,
) -> None:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.merging.adapters import merge_adapters
    from isomerge.reporting.terminal import adapter_table

    name, options = method or "linear", typed_options(method or "linear", request.options)
    if weights is not None:
        options["weight"] = numbers(weights, len(request.models))
    origin = open_checkpoint(base) if base else None
    with voice.work("steps") as progress:
        record = merge_adapters(
            request.models, out=out, method=name, options=options, base=origin, rank=rank, seed=seed, force=force,
            progress=progress,
        )  # fmt: skip
        if report:
            from isomerge.reporting.run_reports import write_adapter_report

            add_report(record, write_adapter_report(out, request.models, record))
    voice.show(record, adapter_table)


def flags_of(context: typer.Context) -> list[str]:
    """The verb's own flags, for suggestions."""
    return [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("-")]
