"""stdout and stderr that cannot fail the work: what was done is done, whether or not anybody can read about it."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

GLYPHS = str.maketrans(
    {"→": "->", "–": "-", "—": "-", "−": "-", "•": "*", "·": "*", "×": "x", "…": "...", "≤": "<=", "≥": ">=", "′": "'"}
)
CLOSED = (errno.EPIPE, errno.EBADF, errno.ESHUTDOWN, *((errno.EINVAL,) if os.name == "nt" else ()))
_lost: list[str] = []
"""Why output could not be printed."""


def prepare() -> None:
    """Let stdout and stderr take any text and survive a reader that went away."""
    _fill_descriptors()
    codecs.register_error("isomerge", _in_other_words)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            binary: Any = io.BufferedWriter(_Forgiving(stream.buffer))
            stream = io.TextIOWrapper(binary, stream.encoding, "isomerge", line_buffering=stream.line_buffering)
        elif stream is None:  # the program was started without it
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  it lives as long as the program
        setattr(sys, name, stream)


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """At the end, report output that found no room: unlike a pipe, whoever redirects into a file wants to have it."""
    try:
        yield
    finally:
        sys.stdout.flush()
        if _lost:
            print(f"isomerge: The work is done, but its output was not printed: {_lost[0]}.", file=sys.stderr)
            sys.exit(1)


def _fill_descriptors() -> None:
    """Open the null device in the place of standard streams that are closed: the next file opened would get their
    number, and whatever a library prints would go into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)


class _Forgiving(io.RawIOBase):
    """A stream whose reader may go away: what is written then is lost, and nothing else."""

    def __init__(self, binary: Any) -> None:
        self._raw = getattr(binary, "raw", binary)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._raw.fileno())

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    def write(self, data: Any, /) -> int:
        try:
            return int(self._raw.write(data))
        except OSError as error:
            if error.errno not in CLOSED:
                _lost.append(error.strerror or str(error))
            return len(data)


def _in_other_words(error: UnicodeError) -> tuple[str, int]:
    """For characters that an encoding lacks: the same in ASCII where there is such a thing, else their number."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return text.translate(GLYPHS).encode("ascii", "backslashreplace").decode("ascii"), error.end
