"""Jobs side by side: models this small leave a GPU waiting for its host, so several processes share it.

Without CUDA's MPS server, processes take turns on a GPU. Training still gains; the many small steps of a merge lose, so
merges run side by side only where the server is there: `nvidia-cuda-mps-control -d` starts it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from runner import Run

J = TypeVar("J")
R = TypeVar("R")


WORKERS = {"small": 8}
"""At most, and about two for three cores. Models of the original size fill a GPU by themselves, and one job uses all
cores of a CPU."""
EACH = 14 << 30
"""Bytes of the GPU that one takes at the small scale, to fine-tune the larger base; and, about, of the machine, to
merge eight of its models."""


def side_by_side(run: Run, function: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
    """The results in order; none where nothing is to be computed."""
    if run.finished:
        return []
    if _workers(run, len(jobs)) < 2:
        return [function(job) for job in jobs]
    with _crew(_workers(run, len(jobs))) as pool:
        return list(pool.map(partial(_tidily, function), jobs))


def cells(run: Run, function: Callable[[J], dict[str, Any]], jobs: Mapping[str, J]) -> dict[str, dict[str, Any]]:
    """One cell a job; those that are not there yet are computed side by side, where the GPU can be shared."""
    missing = [] if run.dry else [key for key in jobs if not run.known(key)]
    if run.finished:
        jobs = {key: job for key, job in jobs.items() if key not in missing}
        if missing:
            run.note(f"Not finished: {len(missing)} of {len(jobs) + len(missing)} ({_told(missing)}).")
        missing = []
    workers = _workers(run, len(missing)) if shared() else 1
    if workers < 2:
        return {key: run.cell(key, partial(function, job)) for key, job in jobs.items()}
    with _crew(workers) as pool:
        waiting = [pool.submit(_compute, run, function, key, jobs[key]) for key in missing]
        failed = [error for done in waiting if (error := done.exception())]
        if failed:
            raise failed[0]
    return {key: run.cell(key, dict) for key in jobs}  # they are there


def _compute(run: Run, function: Callable[[J], dict[str, Any]], key: str, job: J) -> None:
    """Written at once; one that fails takes none with it."""
    try:
        run.cell(key, partial(_tidily, function, job))
    except Exception as error:
        run.say(f"{key}: failed, {error}")
        raise


def _tidily(function: Callable[[J], R], job: J) -> R:
    """Memory of the GPU that is not needed any more is left to the others."""
    try:
        return function(job)
    finally:
        torch.cuda.empty_cache()


def _told(keys: Sequence[str]) -> str:
    return "; ".join(keys[:8]) + (" …" if len(keys) > 8 else "")


def shared() -> bool:
    """Whether the MPS server runs: its control pipe is there."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def _workers(run: Run, jobs: int) -> int:
    if run.device == "cpu":
        return 1
    cores, memory = max(2, 2 * (os.cpu_count() or 1) // 3), max(1, _memory() // EACH)
    return min(jobs, WORKERS.get(run.scale, 1), cores, memory)


def _memory() -> int:
    """Of the GPU or of the machine, whichever has less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else machine


@contextmanager
def _crew(workers: int) -> Iterator[ProcessPoolExecutor]:
    """The processes of the script's last jobs, if there were as many: to start them takes seconds."""
    pool = _pool(workers)
    try:
        yield pool
    except BaseException:
        _pool.cache_clear()  # it may be broken
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@lru_cache(maxsize=1)
def _pool(workers: int) -> ProcessPoolExecutor:
    # Spawned: a forked process cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(threads,))


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """A worker does not outlive its script: one that was killed would leave it working, beside what is timed next."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
