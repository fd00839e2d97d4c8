"""What a merge will take, from headers alone: tensors, bytes, memory, time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from isomerge.merge.api import planned, recipe_plans
from isomerge.merge.group import BLOCK_ELEMENTS, Group, InMemory
from isomerge.merge.memory import RESERVE, fitting_threads, job_memory
from isomerge.merge.merged import Merged, peak_memory, present_memory
from isomerge.merge.pipeline import Job
from isomerge.merge.recipe import Recipe, explain


def plan_merge(
    documents: Sequence[Recipe], *, threads: int | None = None, max_memory: int | str | None = None
) -> dict[str, Any]:
    """The record of `isomerge plan`: all problems are raised at once, nothing but headers is read."""
    merged = planned(documents)
    jobs = merged.jobs
    count = fitting_threads(jobs, threads, max_memory)
    largest = sorted((job_memory(job) for job in jobs), reverse=True)[:count]
    read = sum(i.nbytes for checkpoint in merged.inputs.values() for i in checkpoint.tensors.values())
    written = sum(job.info.nbytes for job in jobs)
    return {
        "method": merged.recipe.merge_method,
        "models": list(merged.inputs),
        "donor": merged.donor.name,
        "tensors": len(jobs),
        "bytes_read": read,
        "bytes_written": written,
        "peak_memory_bytes": max(peak_memory(), present_memory() + RESERVE + sum(largest)),
        "seconds": _seconds(merged, count),
        "threads": count,
        "config_changes": merged.config_changes,
        "alignment": merged.recipe.align is not None,
        "notes": merged.notes
        + (["the time and memory of the alignment are not in this estimate"] if merged.recipe.align else []),
    }


def explain_tensor(documents: Sequence[Recipe], tensor: str) -> dict[str, Any]:
    """The inputs and effective options of one tensor of the last document's output."""
    return explain(recipe_plans(documents)[-1], tensor)


def _seconds(merged: Merged, threads: int) -> float:
    """From one block of random numbers merged here and now: the method's own speed, with reading and writing beside."""
    job = max(merged.jobs, key=lambda job: math.prod(job.info.shape))
    if job.method is None or not math.prod(job.info.shape):
        return 0.0
    block = torch.randn(512, BLOCK_ELEMENTS // 512, dtype=torch.float32).to(job.info.dtype)
    sources = [InMemory(block + k) for k, _ in enumerate(job.sources)]
    group = Group(job.name, sources, InMemory(block) if job.base is not None else None, seed=merged.seed)
    trial = Job("", job.info, sources, InMemory(block) if job.base is not None else None, job.method, job.options)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = min(_timed(trial, group) for _ in range(3))
    finally:
        torch.set_num_threads(before)
    elements = sum(math.prod(job.info.shape) for job in merged.jobs)
    return best / BLOCK_ELEMENTS * elements / threads


def _timed(job: Job, group: Group) -> float:
    start = time.perf_counter()
    assert job.method is not None
    combine = job.method(group, **job.options)
    for block in group.blocks():
        combine(block).to(job.info.dtype)
    return time.perf_counter() - start
