"""What a merge will take, from headers alone: tensors, bytes, memory, time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from blake3 import blake3

from isomerge import system
from isomerge.alignment.api import KEPT_BETWEEN_SWEEPS
from isomerge.alignment.estimate import AlignmentEstimate, estimate_alignment
from isomerge.alignment.scope import Scope
from isomerge.checkpoint import cast, parse_size
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.plan.option_values import stand_ins
from isomerge.merging.prepared_models import models_to_align
from isomerge.merging.recipe_data import DataSets, aligning_data, data_uses
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.memory import RESERVE, fitting_threads, job_memory
from isomerge.merging.run.rows import InMemory, TensorGroup
from isomerge.results import Result
from isomerge.threads import thread_count

TRIAL_ELEMENTS = 2**22  # eight blocks: what a method does once per tensor weighs little
TRIAL_BYTES = 2**23


@dataclass
class MergePlan(Result):
    """What a merge would do and take, as far as headers tell."""

    method: str
    models: list[str]
    donor: str
    """The model whose config and side files the result gets."""
    tensors: int
    bytes_read: int
    bytes_written: int
    peak_memory_bytes: int
    """Of the merge, or of the alignment before it where that takes more."""
    seconds: float
    """To merge: of the wall, where nothing else runs and the disk keeps up; without the start of the program."""
    threads: int
    config_changes: dict[str, Any]
    alignment: bool
    aligning: AlignmentEstimate | None
    """What comes before the merge; None where nothing is aligned, or it cannot be told."""
    data: list[dict[str, Any]]
    """Every purpose with its data, how many examples are used, and how often models run over them."""
    notes: list[str]


def estimate(merged: Merged, *, threads: int | None = None, max_memory: int | str | None = None) -> MergePlan:
    """What it takes to compute and write a merged model that is known from headers only."""
    jobs = merged.jobs
    count = fitting_threads(jobs, threads, max_memory)
    largest = sorted((job_memory(job) for job in jobs), reverse=True)[:count]
    read = sum(i.nbytes for checkpoint in merged.inputs.values() for i in checkpoint.tensors.values())
    written = sum(job.info.nbytes for job in jobs)
    aligning = _aligning(merged, threads, max_memory)
    merging = max(system.peak_memory(), system.present_memory() + RESERVE + sum(largest))
    return MergePlan(
        method=merged.recipe.merge_method,
        models=merged.models,
        donor=merged.donor.name,
        tensors=len(jobs),
        bytes_read=read,
        bytes_written=written,
        peak_memory_bytes=max(merging, aligning.peak_memory_bytes if aligning else 0),
        seconds=_seconds(merged, count, read, written),
        threads=count,
        config_changes=merged.config_changes,
        alignment=merged.recipe.align is not None,
        aligning=aligning,
        data=_runs_over_data(merged),
        notes=merged.notes + _left_out(merged, aligning),
    )


def _runs_over_data(merged: Merged) -> list[dict[str, Any]]:
    opened = DataSets(opened={(one.settings, one.how["prefer"]): one for one in merged.data})
    return [
        {"purpose": use.purpose, "name": data.data.name, "kind": data.data.kind, "size": data.data.size,
         "examples": data.examples, "passes": use.passes}
        for recipe in merged.recipes
        for use in dict.fromkeys(data_uses(recipe))
        for data in [use.open(opened)]
    ]  # fmt: skip


def _aligning(merged: Merged, threads: int | None, max_memory: int | str | None) -> AlignmentEstimate | None:
    """One model after the other next to the anchor."""
    recipe, align = merged.recipe, merged.recipe.align
    references = recipe.referenced_models()
    if align is None or align.many != "anchor" or align.solver != "assignment":
        return None
    if any(str(reference) not in merged.inputs for reference in references):  # the result of an earlier document
        return None
    _, others = models_to_align(recipe, merged.donor, {r: merged.inputs[str(r)] for r in references})
    budget = KEPT_BETWEEN_SWEEPS if max_memory is None else parse_size(max_memory) // 2
    scope = Scope(align.level, align.scale, align.layers, align.only)
    parts = [estimate_alignment(model, scope, threads=thread_count(threads), budget=budget) for model in others]
    return AlignmentEstimate(
        sum(part.strangers_seconds for part in parts), sum(part.siblings_seconds for part in parts),
        max((part.peak_memory_bytes for part in parts), default=0),
    )  # fmt: skip


def _left_out(merged: Merged, aligning: AlignmentEstimate | None) -> list[str]:
    recipe, notes = merged.recipe, []
    if recipe.align and aligning is None:
        notes.append("the time and memory of this way to align are not in this estimate")
    elif recipe.align and aligning_data(recipe):
        notes.append("the alignment's runs over data and steps of learning are not in this estimate")
    if merged.data:
        notes.append("the time and memory of running models over data are not in this estimate")
    return notes


class _Read(InMemory):
    """As from the system's cache of files: a copy every time a method asks."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return super().rows(start, stop).clone()


def _seconds(merged: Merged, threads: int, read: int, written: int) -> float:
    """From random numbers read, merged, hashed and copied here and now, in seconds of the processor: how busy the
    machine is at this moment says nothing of the merge."""
    probe = bytes(TRIAL_BYTES)
    hashing = _fastest(lambda: blake3(probe)) / TRIAL_BYTES
    copying = _fastest(lambda: bytearray(probe)) / TRIAL_BYTES
    job = max(merged.jobs, key=lambda job: job.info.nbytes)
    each = 0.0
    if job.method is not None and 0 not in job.info.shape:
        rows = torch.randn(TRIAL_ELEMENTS // 1024, 1024).to(job.info.dtype)
        sources = [_Read(rows + k) for k, _ in enumerate(job.sources)]
        base = _Read(rows) if job.base is not None else None
        option_tensors = stand_ins(job.method, rows.shape, len(sources))
        trial = Job("", job.info, sources, base, job.method, job.options, option_tensors)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            group = partial(TensorGroup, job.name, sources, base, option_tensors=option_tensors, seed=merged.seed)
            each = min(_timed(trial, group()) for _ in range(2)) / TRIAL_ELEMENTS  # the first one also loads code
        finally:
            torch.set_num_threads(before)
    elements: int = sum(torch.Size(job.info.shape).numel() for job in merged.jobs)
    moving = hashing * (read + written) + copying * written
    return (each * elements + moving) / min(threads, system.processors())  # of more threads, one waits for the disk


def _fastest(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def _timed(job: Job, group: TensorGroup) -> float:
    start = time.thread_time()
    assert job.method is not None
    combine = job.method(group, **job.options)
    for block in group.blocks():
        cast(combine(block), job.info.dtype)
    return time.thread_time() - start
