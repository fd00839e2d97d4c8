"""How much memory a merge takes, how many workers fit into what is allowed, and how freed memory is used again."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from isomerge.checkpoint import parse_size
from isomerge.errors import RequestError
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import BLOCK_ELEMENTS, rows_of
from isomerge.merging.run.sources import Computed, Stored
from isomerge.threads import thread_count

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# The methods' temporaries, in blocks of the computing dtype beside those of the inputs; measured, with room to spare.
TEMPORARIES = 10
# What the program still takes beside its workers: modules that are imported late, buffers of reading and hashing.
RESERVE = 48 * 2**20
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 2**30


def job_memory(job: Job) -> int:
    """About how many bytes a worker holds while it makes this tensor."""
    inputs = len(job.sources) + (job.base is not None)
    rows, row = rows_of(job.info.shape)
    width = 8 if any(s.info.dtype == torch.float64 for s in job.sources) else 4
    block = min(max(BLOCK_ELEMENTS // max(row, 1), 1), max(rows, 1)) * row
    whole = math.prod(job.info.shape)
    held = (inputs + TEMPORARIES) * block * width
    every = [*job.sources, *([job.base] if job.base is not None else [])]
    held += sum(whole * s.info.dtype.itemsize for s in every if isinstance(s, Computed))
    held += sum(whole * 4 + job_memory(s.inner) for s in every if isinstance(s, Stored) and s.inner is not None)
    held += whole * inputs // 8  # masks that random methods remember, a bit an element
    if job.method is not None and job.method.whole and len(job.info.shape) > 1:
        held += (3 * inputs + 2) * whole * width  # the inputs, and the factors of each
    return held


def fitting_threads(jobs: Sequence[Job], threads: int | None, max_memory: int | str | None) -> int:
    """As many workers as the memory allows; an error where it does not allow one."""
    count = thread_count(threads)
    if max_memory is None:
        return count
    limit, used = parse_size(max_memory), present_memory() + RESERVE
    most = max((job_memory(job) for job in jobs), default=0)
    if used + most > limit:
        raise RequestError(
            f"Merging within max_memory {max_memory}: the largest tensor needs {most / 1e6:,.0f} MB and the program "
            f"itself {used / 1e6:,.0f} MB. Allow at least {math.ceil((used + most) / 1e6):,} MB.",
            keys=("max_memory",),
        )
    return max(1, min(count, (limit - used) // max(most, 1)))


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (kilobytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource is not None else 0
    return int(peak if sys.platform == "darwin" else peak * 1024)


def present_memory() -> int:
    """What this process holds now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_memory()
    return pages * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Tell glibc to use freed blocks again instead of returning each to the system.

    A merge frees and takes blocks of a few megabytes ten thousand times; asking the kernel for fresh pages every time
    makes it up to twice as slow. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # the last: Windows has no library of the process
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT)
        library.mallopt(MMAP_THRESHOLD, KEPT)
