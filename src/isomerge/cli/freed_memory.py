"""How this process keeps the memory it frees."""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 2**30


def keep_freed_memory() -> None:
    """Tell glibc to use freed blocks again instead of returning each to the system.

    A merge frees and takes blocks of a few megabytes ten thousand times; asking the kernel for fresh pages every time
    makes it up to twice as slow. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT)
        library.mallopt(MMAP_THRESHOLD, KEPT)
