"""A file as the system describes it, to notice that it was changed without reading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """A file as the system describes it. A file that is written again has another time, one that is replaced another
    inode; who sets the time back on purpose is not noticed."""

    size: int
    time: int
    inode: int

    @classmethod
    def of(cls, given: Path | int) -> Stamp | None:
        """None where there is no such file, or it cannot be looked at."""
        try:
            state = os.stat(given)
        except OSError:
            return None
        return cls(state.st_size, state.st_mtime_ns, state.st_ino)
