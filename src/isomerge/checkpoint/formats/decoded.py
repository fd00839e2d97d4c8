"""A checkpoint whose tensors are computed from stored ones when they are read: dequantised, renamed, reordered."""

from __future__ import annotations

import math
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.checkpoint.side_files import side_files_of

BLOCK_ELEMENTS = 2**21
STORED = "stored"


class Decoder(ABC):
    """How one tensor is computed from what is stored."""

    info: TensorInfo
    """Of the tensor as it is seen."""

    @abstractmethod
    def rows(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows [start, stop), perhaps in a wider dtype than `info` says; of fewer than two axes all of it."""


class DecodedCheckpoint(Checkpoint):
    """Stored tensors seen through their decoders, a block of rows at a time; the whole model is never in memory.

    `read_rows` gives what the decoder computes, so a merge works on unrounded values; `read` rounds to the dtype that
    `tensors` names.
    """

    def __init__(
        self,
        stored: Checkpoint,
        decoders: Mapping[str, Decoder],
        *,
        config: dict[str, Any],
        read_as: str,
        beside: Callable[[Path], None] | None = None,
    ) -> None:
        """`beside` writes the side files into a folder when they are first asked for; without it they are the stored
        checkpoint's own."""
        self.name, self.config, self.revision, self.read_as = stored.name, config, stored.revision, read_as
        self.description, self.stems = stored.description, stored.stems
        self._stored, self._decoders, self._beside = stored, dict(decoders), beside
        stored.kind = STORED
        kept = {name: decoder.info for name, decoder in decoders.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: kept[name] for name in sorted(kept)}
        self._made: Path | None = None
        self._making = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None, "_making": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_making": threading.Lock()}

    @property
    def folder(self) -> Path | None:  # type: ignore[override]
        """Where the side files lie; those of a single file are made here, when somebody looks for them."""
        if self._beside is None:
            return self._stored.folder
        with self._making:
            if self._made is None:
                made = Path(tempfile.mkdtemp(dir=_temporary().name))
                self._beside(made)
                self._made = made
        return self._made

    def side_files(self) -> list[Path]:
        folder = self.folder
        return self._stored.side_files() if self._beside is None or folder is None else side_files_of(folder)

    def identity(self) -> Any:
        return self._stored.identity()

    def changed(self) -> list[Path | str]:
        return self._stored.changed()

    def parts(self) -> list[Checkpoint]:
        """What is stored: locks hash the bytes on disk."""
        return self._stored.parts()

    def read(self, name: str) -> Tensor:
        info = self._decoder(name).info
        whole = torch.empty(info.shape, dtype=info.dtype)
        if len(info.shape) < 2:
            return whole.copy_(self.read_rows(name, 0, 1))
        rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(info.shape[1:])))
        for start in range(0, info.shape[0], rows):
            stop = min(start + rows, info.shape[0])
            whole[start:stop] = self.read_rows(name, start, stop)
        return whole

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._decoder(name).rows(self._stored, start, stop)

    def read_span(self, name: str, start: int, stop: int) -> Tensor:
        info = self._decoder(name).info
        stop = min(stop, math.prod(info.shape))
        if len(info.shape) < 2 or stop <= start:
            return self.read(name).reshape(-1)[start:stop].clone()
        row = math.prod(info.shape[1:])
        first, last = start // row, -(-stop // row)
        values = self.read_rows(name, first, last).reshape(-1)[start - first * row : stop - first * row]
        return values.to(info.dtype, copy=True)

    def _decoder(self, name: str) -> Decoder:
        if name not in self._decoders:
            self.unknown_tensor(name)
        return self._decoders[name]


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """One folder for all that this process makes; it goes away with the process."""
    return tempfile.TemporaryDirectory(prefix="isomerge-beside-")


class AsStored(Decoder):
    """A tensor that needs no decoding."""

    def __init__(self, name: str, info: TensorInfo) -> None:
        self.name, self.info = name, info

    def rows(self, stored: Checkpoint, start: int, stop: int) -> Tensor:
        return stored.read_rows(self.name, start, stop)
