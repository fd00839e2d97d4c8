"""Where a method's rows come from: a file, an aligned model, a tensor computed when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.hashing import TENSOR_HASH, TENSOR_HASHES, raw_bytes
from isomerge.checkpoint.local import FileCheckpoint
from isomerge.merging.run.rows import FirstRows, TensorSource


class InputHashes:
    """The hash of every input tensor that some pass has read from end to end, taken on the way."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.taken: dict[tuple[int, str], str] = {}
        self._claimed: set[tuple[int, str]] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHashes, (self.wanted,)  # hashes are of checkpoints in this process: elsewhere they are taken again

    def claim(self, key: tuple[int, str]) -> Any:
        """A fresh hash, unless this tensor has been hashed or somebody is at it."""
        with self._lock:
            if key in self._claimed:
                return None
            self._claimed.add(key)
            return TENSOR_HASHES[TENSOR_HASH]()

    def give_up(self, key: tuple[int, str]) -> None:
        with self._lock:
            self._claimed.discard(key)

    def found(self, checkpoint: Checkpoint, hashes: Mapping[str, str]) -> None:
        """Take over what another process has found of this checkpoint."""
        self.taken |= {(id(checkpoint), name): digest for name, digest in hashes.items()}

    def hand_over(self, checkpoints: Sequence[Checkpoint]) -> dict[int, dict[str, str]]:
        """What was found since the last call, by the place of the checkpoint."""
        places = {id(checkpoint): place for place, checkpoint in enumerate(checkpoints)}
        taken, self.taken = self.taken, {}
        found: dict[int, dict[str, str]] = {}
        for (model, name), digest in taken.items():
            if model in places:
                found.setdefault(places[model], {})[name] = digest
        return found

    def of(self, checkpoint: Checkpoint) -> dict[str, str]:
        """By tensor name."""
        return {name: digest for (model, name), digest in self.taken.items() if model == id(checkpoint)}


class Stored:
    """A tensor of a checkpoint, read block by block and hashed while it passes."""

    def __init__(self, checkpoint: Checkpoint, tensor: str, hashes: InputHashes | None = None) -> None:
        self.info: TensorInfo = checkpoint.tensors[tensor]
        self.label = f"tensor '{tensor}' of {checkpoint.name}"
        self._given = (checkpoint, tensor, hashes)
        self._checkpoint, self._tensor = checkpoint, tensor
        # Rows that a view computes are not the stored bytes.
        self._hashes = hashes if isinstance(checkpoint, FileCheckpoint) else None
        self._key = (id(checkpoint), tensor)
        self._running: Any = None
        self._next = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, self._given

    @property
    def inner(self) -> Any:
        """The job that makes this tensor, where it is the result of another merge."""
        return getattr(self._checkpoint, "jobs", {}).get(self._tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        rows = self._checkpoint.read_rows(self._tensor, start, stop)
        if self._hashes is not None and self._hashes.wanted:
            self._hash(rows, start, stop, self._hashes)
        return rows

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def release(self) -> None:
        """A result that feeds another merge is held while it is read."""
        if hasattr(self._checkpoint, "forget"):
            self._checkpoint.forget()

    def _hash(self, rows: Tensor, start: int, stop: int, hashes: InputHashes) -> None:
        if self._running is None and start == 0:
            self._running, self._next = hashes.claim(self._key), 0
        if self._running is None:
            return
        if start != self._next:  # a sample or a second look: a later pass from end to end will do it
            self._running = None
            hashes.give_up(self._key)
            return
        self._running.update(raw_bytes(rows))
        self._next = stop
        if len(self.info.shape) < 2 or stop == self.info.shape[0]:
            hashes.taken[self._key] = self._running.hexdigest()
            self._running = None


def fitting_source(
    checkpoint: Checkpoint, tensor: str, shape: tuple[int, ...], hashes: InputHashes | None = None, *, longer: bool
) -> TensorSource | None:
    """What a file of statistics holds for a tensor of this shape, or None; if the models' tables are of different
    length, it may have more rows than `shape`, which is what all have."""
    info = checkpoint.tensors.get(tensor)
    if info is None or (info.shape != shape and not (longer and info.shape[1:] == shape[1:] and info.shape > shape)):
        return None
    stored = Stored(checkpoint, tensor, hashes)
    return stored if info.shape == shape else FirstRows(stored, shape[0])


class Computed:
    """A tensor that is made whole when its first rows are asked for, and kept until it is released."""

    def __init__(self, info: TensorInfo, label: str, make: Callable[[], Tensor]) -> None:
        # What is computed in float64 and never stored is merged in float64 where the result can show it.
        wide = torch.float64 if info.dtype.itemsize >= 4 else torch.float32
        self.info = TensorInfo(info.shape, wide)
        self.label = label
        self._make = make
        self._made: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def rows(self, start: int, stop: int) -> Tensor:
        if self._made is None:
            self._made = self._make().to(self.info.dtype)
        return self._made[start:stop] if self._made.dim() > 1 else self._made

    def release(self) -> None:
        self._made = None
