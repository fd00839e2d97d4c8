"""How much memory a merge takes and how many workers fit into what is allowed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from isomerge import system
from isomerge.checkpoint import parse_size
from isomerge.errors import RequestError
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import BLOCK_ELEMENTS, rows_of
from isomerge.merging.run.sources import Computed, Stored
from isomerge.threads import thread_count

# The methods' temporaries, in blocks of the computing dtype beside those of the inputs; measured, with room to spare.
TEMPORARIES = 10
# What the program still takes beside its workers: modules that are imported late, buffers of reading and hashing.
RESERVE = 48 * 2**20


def job_memory(job: Job) -> int:
    """About how many bytes a worker holds while it makes this tensor."""
    inputs = len(job.sources) + (job.base is not None)
    rows, row = rows_of(job.info.shape)
    width = 8 if any(s.info.dtype == torch.float64 for s in job.sources) else 4
    block = min(max(BLOCK_ELEMENTS // max(row, 1), 1), max(rows, 1)) * row
    whole = math.prod(job.info.shape)
    held = (inputs + TEMPORARIES) * block * width
    every = job.stored_sources
    held += sum(whole * s.info.dtype.itemsize for s in every if isinstance(s, Computed))
    held += sum(whole * 4 + job_memory(s.inner) for s in every if isinstance(s, Stored) and s.inner is not None)
    held += whole * inputs // 8  # masks that random methods remember, a bit an element
    if job.method is not None and job.method.whole and len(job.info.shape) > 1:
        held += (3 * inputs + 2) * whole * width  # the inputs, and the factors of each
    return held


def in_flight(max_memory: int | str | None) -> int:
    """How many bytes all workers together may hold: what `max_memory` leaves, else a quarter of the machine's memory,
    and a gigabyte where that is less or unknown."""
    if max_memory is not None:
        return max(0, parse_size(max_memory) - system.present_memory() - RESERVE)
    return max(2**30, (system.machine_memory() or 0) // 4)


class Room:
    """Memory that workers share. Each takes what its tensor needs and waits while there is not enough; the one that
    needs more than there is works alone."""

    def __init__(self, size: int) -> None:
        self._size, self._taken = size, 0
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        count = min(count, self._size)
        with self._freed:
            self._freed.wait_for(lambda: not self._taken or self._taken + count <= self._size)
            self._taken += count
        try:
            yield
        finally:
            with self._freed:
                self._taken -= count
                self._freed.notify_all()


def fitting_threads(jobs: Sequence[Job], threads: int | None, max_memory: int | str | None) -> int:
    """As many workers as the memory allows; an error where it does not allow one. Unless a number is asked for, one
    more than there are processors: one of them waits for the disk."""
    count = thread_count(threads) + (threads is None)
    if max_memory is None:
        return count
    limit, used = parse_size(max_memory), system.present_memory() + RESERVE
    most = max((job_memory(job) for job in jobs), default=0)
    if used + most > limit:
        raise RequestError(
            f"Merging within max_memory {max_memory}: the largest tensor needs {most / 1e6:,.0f} MB and the program "
            f"itself {used / 1e6:,.0f} MB. Allow at least {math.ceil((used + most) / 1e6):,} MB.",
            keys=("max_memory",),
        )
    return max(1, min(count, (limit - used) // max(most, 1)))
