"""Byte strings written once and read back in any order: in memory while they are few, else in a temporary file."""

from __future__ import annotations

import tempfile
import threading

from isomerge.data.base import KEPT


class Spool:
    """
    >>> spool = Spool()
    >>> [spool.append(b"one"), spool.append(b"three"), spool.read(1), spool.read(0)]
    [0, 1, b'three', b'one']
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=KEPT)  # noqa: SIM115  it lives as long as the spool
        self._ends = [0]
        self._lock = threading.Lock()

    def append(self, content: bytes) -> int:
        """Returns the number under which it is kept."""
        with self._lock:
            self._file.seek(self._ends[-1])
            self._file.write(content)
            self._ends.append(self._ends[-1] + len(content))
            return len(self._ends) - 2

    def read(self, number: int) -> bytes:
        return self.slice(self._ends[number], self._ends[number + 1])

    def slice(self, start: int, stop: int) -> bytes:
        with self._lock:
            self._file.seek(start)
            return self._file.read(stop - start)

    @property
    def nbytes(self) -> int:
        return self._ends[-1]
