"""The weight files on disk: safetensors, and pickles through torch's restricted loader."""

from __future__ import annotations

import math
import os
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from isomerge import system
from isomerge.checkpoint.base import TensorInfo, WeightFile, failure, first_line
from isomerge.checkpoint.header import Entry, HeaderError, read_header
from isomerge.checkpoint.stamp import Stamp
from isomerge.errors import CheckpointError

ARCHIVE = b"PK\x03\x04"  # how a zip file begins, which PyTorch writes since 1.6


class SpannedFile(WeightFile):
    """A safetensors file, wherever it is: every read fetches exactly the bytes that it needs."""

    def __init__(self, label: str, entries: Mapping[str, Entry]) -> None:
        self.label = label
        self._entries = entries
        self.tensors: Mapping[str, TensorInfo] = {name: entry.info for name, entry in entries.items()}
        self._scratch = threading.local()

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """What the header says beside its tensors, such as the format; read anew."""

    @abstractmethod
    def _fill(self, name: str, start: int, buffer: torch.Tensor) -> None:
        """The file's bytes from `start` on, which are part of this tensor."""

    def read(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        buffer = torch.empty(entry.info.nbytes, dtype=torch.uint8)
        self._fill(name, entry.start, buffer)
        return buffer.view(entry.info.dtype).reshape(entry.info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Into memory that this thread uses again at its next call: a merge reads a hundred thousand blocks."""
        entry = self._entries[name]
        shape = entry.info.shape
        row = math.prod(shape[1:]) * entry.info.dtype.itemsize
        begin, shape = (start * row, (stop - start, *shape[1:])) if len(shape) > 1 else (0, shape)
        count = math.prod(shape) * entry.info.dtype.itemsize
        scratch = getattr(self._scratch, "buffer", None)
        if scratch is None or len(scratch) < count:
            scratch = self._scratch.buffer = torch.empty(count, dtype=torch.uint8)
        buffer = scratch[:count]
        self._fill(name, entry.start + begin, buffer)
        return buffer.view(entry.info.dtype).reshape(shape)

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        entry = self._entries[name]
        width = entry.info.dtype.itemsize
        stop = min(stop, math.prod(entry.info.shape))
        buffer = torch.empty((stop - start) * width, dtype=torch.uint8)
        self._fill(name, entry.start + start * width, buffer)
        return buffer.view(entry.info.dtype)


class LocalFile(SpannedFile):
    """Read from a descriptor that is opened once: positioned reads need no lock, and no memory map grows."""

    def __init__(self, path: Path, header: Callable[[Path], Mapping[str, Entry]]) -> None:
        self.path = path
        self._stamp = Stamp.of(path)  # just before it is opened
        super().__init__(path.name, header(path))
        self._opening = threading.Lock()
        self._descriptor: int | None = None

    def identity(self) -> Any:
        return _known(self.path, self._stamp)

    def changed(self) -> list[Path]:
        return [] if Stamp.of(self.path) == self._stamp else [self.path]

    def _fill(self, name: str, start: int, buffer: torch.Tensor) -> None:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        got = 0
        try:
            descriptor = self._open()
            while got < len(view):
                count = system.read_at(descriptor, view[got:], start + got)
                if not count:
                    break
                got += count
        except OSError as error:
            raise CheckpointError(
                f"While reading tensor '{name}' from {self.path}: {error.strerror or error}. "
                "Check that the disk is still there and the file readable, then run again."
            ) from error
        if got != len(view):
            raise CheckpointError(
                f"While reading tensor '{name}' from {self.path}: the file ended {len(view) - got:,} bytes early, "
                "so it changed since it was opened. Restore the file and run again."
            )

    def _open(self) -> int:
        if self._descriptor is None:
            with self._opening:
                if self._descriptor is None:
                    descriptor = system.open_to_read(self.path)
                    if Stamp.of(descriptor) != self._stamp:  # its header was read from another file
                        os.close(descriptor)
                        raise OSError(None, "the file changed since it was opened")
                    self._descriptor = descriptor
        return self._descriptor

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


class SafetensorsFile(LocalFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, read_header)

    def metadata(self) -> dict[str, str]:
        with safe_open(self.path, framework="pt") as file:
            return dict(file.metadata() or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (self.path, open_weight_file)


class PickledFile(WeightFile):
    """A .bin file. Only plain tensors are unpickled. Their data stays on disk, mapped, until it is read; a file of
    before PyTorch 1.6 is no archive that could be mapped, and is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.label, self._stamp = path, path.name, Stamp.of(path)
        self._state = _unpickled(path)
        self.tensors: Mapping[str, TensorInfo] = {name: TensorInfo.of(t) for name, t in self._state.items()}

    def identity(self) -> Any:
        return _known(self.path, self._stamp)

    def changed(self) -> list[Path]:
        return [] if Stamp.of(self.path) == self._stamp else [self.path]

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (self.path, open_weight_file)

    def read(self, name: str) -> torch.Tensor:
        return self._state[name].detach().clone(memory_format=torch.contiguous_format)

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._state[name].detach().reshape(-1)[start:stop].clone()


def _known(path: Path, stamp: Stamp | None) -> Any:
    return None if stamp is None else [str(path.resolve()), stamp.size, stamp.time]


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle, through the loader of PyTorch that makes nothing else."""
    try:
        with path.open("rb") as file:
            archive = file.read(len(ARCHIVE)) == ARCHIVE
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        raise HeaderError(
            "it is a pickle with more in it than tensors, which could run code when loaded, so it was refused",
            "Use the model's safetensors; or, where you trust its origin, load it once with transformers and save "
            "it again.",
        ) from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle fails wherever its bytes lead the loader
        raise HeaderError(f"PyTorch cannot read it, so it is truncated or corrupt ({first_line(error)})") from error
    if not isinstance(state, dict):
        raise HeaderError(f"it holds a {type(state).__name__} and not a state_dict")
    odd = sorted(str(n) for n, value in state.items() if not (isinstance(n, str) and isinstance(value, torch.Tensor)))
    if odd:
        raise HeaderError(f"it is not a flat state_dict: '{odd[0]}' is no tensor. Save the inner state_dict alone")
    # A few bytes can stand for a tensor of any size: one that repeats its storage, or has none.
    empty = [name for name, tensor in state.items() if not _is_stored(tensor)]
    if empty:
        raise HeaderError(
            f"its tensor '{min(empty)}' is not stored in full. Save the state_dict again, as plain tensors"
        )
    return state


def _is_stored(tensor: torch.Tensor) -> bool:
    """Whether every element has bytes of its own."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def open_weight_file(path: Path) -> WeightFile:
    """Open by suffix; raises HeaderError with what is wrong."""
    try:
        return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
    except OSError as error:
        raise HeaderError(f"it cannot be read ({error.strerror or error})") from error


def reopened(path: Path, opener: Callable[[Path], WeightFile]) -> WeightFile:
    """A file of a checkpoint that was pickled or copied: descriptors and maps are opened anew."""
    try:
        return opener(path)
    except HeaderError as error:
        raise failure(f"opening {path} again", [str(error)], "Restore the file, then run again.") from error
