"""Writes that go past the system's cache of pages.

A merge writes gigabytes that nobody reads back soon. Through the cache each byte is copied twice and, once the cache is
full of bytes that wait for the disk, the process waits too: a fast disk takes several times as much directly.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

from isomerge import system

PAGE = max(4096, mmap.PAGESIZE)
LEAST = 2**18  # below it, the wait for the disk costs more than the copies
BUFFER = 2**22
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class DirectFile:
    """The whole pages of what any thread writes; the ends, which share a page with others, are left to the caller."""

    def __init__(self, path: Path) -> None:
        self._descriptor = system.open_past_cache(path)
        self._own = threading.local()

    def write(self, view: memoryview, start: int) -> tuple[int, int]:
        """Which part of the view is now at its place in the file, whose byte `start` is its first: perhaps nothing."""
        begin, end = -start % PAGE, len(view) - (start + len(view)) % PAGE
        if self._descriptor is None or end - begin < LEAST:
            return 0, 0
        done = begin
        try:
            while done < end:
                done += self._piece(self._descriptor, view[done : min(end, done + BUFFER)], start + done)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            return 0, 0  # a file system that opens what it then does not take
        return begin, end

    def _piece(self, descriptor: int, view: memoryview, place: int) -> int:
        """Through memory that begins with a page, as the system asks for; how many whole pages it took."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = mmap.mmap(-1, BUFFER)
        self._own.buffer[: len(view)] = view
        with memoryview(self._own.buffer) as buffer, buffer[: len(view)] as piece:
            taken = system.write_at(descriptor, piece, place)
        if taken < PAGE:
            raise OSError(errno.EINVAL, "less than a page was written")
        return taken - taken % PAGE

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
