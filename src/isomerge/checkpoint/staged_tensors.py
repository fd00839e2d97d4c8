"""The tensors of a writer as another process writes them: rows into staged files whose headers are there already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from isomerge import system
from isomerge.checkpoint.hashing import TENSOR_HASH, TENSOR_HASHES, raw_bytes
from isomerge.checkpoint.journal import journal_key
from isomerge.errors import CheckpointError

CHUNK = 16 * 2**20
WriteBytes = Callable[[int, memoryview], None]
"""Puts bytes at their place, counted from the tensor's own start."""


class TensorSink(Protocol):
    """Where tensors are written, each opened for as long as its bytes come."""

    def opened(self, name: str) -> contextlib.AbstractContextManager[WriteBytes]: ...


@dataclass(frozen=True)
class StagedTensors:
    """All that a process needs which is not the one that commits: it creates nothing, and finishes nothing."""

    folder: Path
    key: str | None
    """The work that the folder is staged for. A worker that outlives its driver must not write into another's files."""
    places: Mapping[str, tuple[str, int]]
    """By tensor: the file, and where in it the tensor starts."""

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[WriteBytes]:
        """On the disk when it is closed: only this machine knows what it has not brought there yet."""
        file_name, begin = self.places[name]
        with self._blaming(name):
            if journal_key(self.folder) != self.key:
                raise OSError("another run has taken the folder over")
            file = (self.folder / file_name).open("r+b", buffering=0)
        with file:

            def write(offset: int, view: memoryview) -> None:
                with self._blaming(name):
                    write_all(file.fileno(), view, begin + offset)

            yield write
            with self._blaming(name):
                system.sync(file)

    @contextlib.contextmanager
    def _blaming(self, name: str) -> Iterator[Any]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"While writing tensor '{name}' into {self.folder}: {error.strerror or error}. Check that every worker "
                "can write there, then run the same command again."
            ) from error


def write_tensor(
    sink: TensorSink, name: str, tensor: torch.Tensor, progress: Callable[[int], None] | None = None
) -> str:
    """Write a whole tensor; the hash of its bytes."""
    view, digest = raw_bytes(tensor), TENSOR_HASHES[TENSOR_HASH]()
    with sink.opened(name) as write:
        for begin in range(0, len(view), CHUNK):
            piece = view[begin : begin + CHUNK]
            write(begin, piece)
            digest.update(piece)
            if progress:
                progress(len(piece))
    return str(digest.hexdigest())


def write_all(descriptor: int, data: memoryview | bytes, start: int) -> None:
    """All of it, however little one call takes."""
    view = memoryview(data)
    while view:
        done = system.write_at(descriptor, view, start)
        view, start = view[done:], start + done
