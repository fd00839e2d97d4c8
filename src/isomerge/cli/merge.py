"""`isomerge merge`: a recipe, or models and a method, to one model; aligned first when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isomerge.cli.flags import (
    Address,
    DataFlags,
    Device,
    Engine,
    Force,
    MergeFlags,
    MergeMemory,
    Models,
    OutDtype,
    Reading,
    ShardSize,
    Threads,
    option,
    switch,
)
from isomerge.cli.output import Voice, as_record
from isomerge.cli.report import add_report
from isomerge.cli.request import MergeRequest, find_output, flags_given, place_of, read_request, reserve_output
from isomerge.cli.verb import verb
from isomerge.errors import RequestError


@verb(
    "Merge models into one, by a recipe or flags.",
    "isomerge merge model-a model-b --method ties --base base --density 0.5 -o merged",
    method_options=True,
)
def merge(
    context: typer.Context,
    models: Models,
    *,
    out: Annotated[
        Path | None,
        option(
            "OUT",
            "The folder to write, or an address (s3://, gs://); after a recipe, it may stand alone.",
            "-o",
            "--out",
        ),
    ] = None,
    merging: MergeFlags,
    data_use: DataFlags,
    reading: Reading,
    shard_size: ShardSize = "5GB",
    out_dtype: OutDtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    max_memory: MergeMemory = None,
    seed: Annotated[int | None, option("N", "Random seed; the recipe's, or 0, by default.")] = None,
    lock: Annotated[bool, switch("--lock/--no-lock", "Hash every tensor and write a lock file.")] = True,
    report: Annotated[bool, switch("--report/--no-report", "Write a model card and report.html.")] = True,
    copy_tokenizer: Annotated[
        bool, switch("--copy-tokenizer/--no-copy-tokenizer", "Copy the tokenizer with the other side files.")
    ] = True,
    verify: Annotated[bool, switch("--verify/--no-verify", "Check the written model.")] = True,
    rank: Annotated[int | None, option("R", "Rank of a merged adapter.", min=1)] = None,
    push: Annotated[str | None, option("ORG/NAME", "Upload the result to the hub.")] = None,
    force: Force = False,
    voice: Voice,
) -> None:
    """Merge models of one architecture into one, by a recipe or flags.

    A method's options are flags too: --density 0.5, --t 0.3, --lambda 0.8, --no-normalize; with commas, one value per
    model. Models with different tokenizers: isomerge merge A B --tokenizer union -o OUT.
    """
    request, out = find_output(read_request(models, context), out, context)
    if request.are_adapters:
        flags = {
            "--align": merging.align, "--level": merging.level, "--tokenizer": merging.tokenizer, "--push": push,
            "--layer-scale": merging.layer_scale,
            "--out-dtype": out_dtype, "--max-memory": max_memory, "--threads": threads,
            "--shard-size": shard_size != "5GB", "--device": device != "cpu", "--engine": engine != "threads",
            "--address": address,
        }  # fmt: skip
        unused = [flag for flag, value in flags.items() if value] + flags_given(reading, data_use)
        if unused:
            raise RequestError(f"{', '.join(unused)} has no effect when merging adapters. Leave it out.")
        reserve_output(out, request.models, force=force)
        _merge_adapters(request, merging, out, rank=rank, seed=seed or 0, report=report, force=force, voice=voice)
        return
    if rank is not None:
        raise RequestError("--rank applies to adapters, and these are models. Leave it out, or see isomerge extract.")
    if push:
        from isomerge.checkpoint.push import require_access

        require_access(push)
    documents = request.documents(merging, reading, data_use, seed=seed)
    references = list(dict.fromkeys(str(model) for recipe in documents for model in recipe.referenced_models()))
    reserve_output(out, [*references, *map(str, data_use.data or ())], force=force, by_url=True)

    import isomerge
    from isomerge.reporting.terminal import merge_table
    from isomerge.system import keep_freed_memory

    keep_freed_memory()
    with place_of(out, force=force) as place, voice.work("both") as progress:
        merged = isomerge.merge_recipe(
            documents, threads=threads, engine=engine, address=address, device=device, max_memory=max_memory, seed=seed,
            same_ids=request.recipe is None and merging.same_ids, progress=progress, resume=place.folder,
        )  # fmt: skip
        written = merged.save(
            place.folder, shard_size=shard_size, out_dtype=out_dtype, force=force, lock=lock, report=report,
            copy_tokenizer=copy_tokenizer, finish=False,
        )  # fmt: skip
        record = finished(merged, written, verify=verify, report=report)
        if push:
            from isomerge.reporting.publish import push as push_model

            record["pushed"] = push_model(place.folder, push, quiet=voice.is_silent).models[0].address
        record = place.send(record, progress)
        written.finish()
    voice.show(record, merge_table)


def finished(merged: Any, written: Any, *, verify: bool, report: bool) -> dict[str, Any]:
    """The record of a model that was written, checked and reported as asked for."""
    record = as_record(merged.report()) | written_record(written)
    if verify:
        record["verified"] = merged.verify(written)
    if report:
        add_report(record, merged.write_report(written))
    return record


def written_record(written: Any) -> dict[str, Any]:
    """What was written: the last keys of a record."""
    return {key: getattr(written, key) for key in ("out", "files", "tensors", "bytes", "sha256")}


def _merge_adapters(
    request: MergeRequest,
    merging: MergeFlags,
    out: Path,
    *,
    rank: int | None,
    seed: int,
    report: bool,
    force: bool,
    voice: Voice,
) -> None:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.merging.adapters import merge_adapters
    from isomerge.reporting.terminal import adapter_table

    options = request.method_options(merging)
    base = open_checkpoint(merging.base) if merging.base else None
    with voice.work("steps") as progress:
        record = as_record(
            merge_adapters(
                request.models, out=out, method=merging.method or "linear", options=options, base=base, rank=rank,
                seed=seed, force=force, progress=progress,
            )
        )  # fmt: skip
        if report:
            from isomerge.reporting.adapter_report import write_adapter_report

            add_report(record, write_adapter_report(out, request.models, record))
    voice.show(record, adapter_table)
