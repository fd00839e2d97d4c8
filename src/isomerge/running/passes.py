"""Passes over data: a limit, the right device and dtype, a count, a hash, and the same examples every time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isomerge.arguments import require_types
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.hashing import raw_bytes
from isomerge.data.base import Batch, Batches
from isomerge.errors import RequestError

BATCH_SIZE = 32


class DataPass:
    """The batches of a data set. Iterate over it as often as the work needs; every pass gives the same examples.

    At most `limit` examples are given, on `device`, and floats in `dtype`, where those are named. `labels=False` leaves
    labels out. Up to `budget` bytes of batches stay in memory for the next pass. `progress` is called after each
    batch with `total`, or with the limit. `sha256` and `examples` describe what was read, once a pass is over.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        limit: int | None = None,
        labels: bool = True,
        budget: int = 0,
        hashed: bool = True,
        progress: Progress | None = None,
        total: int | None = None,
        what: str = "reading data",
    ) -> None:
        require_types(limit=(limit, int, None))
        if limit is not None and limit < 1:
            raise RequestError(f"Reading data with a limit of {limit}: at least one example is needed.")
        self.examples = 0
        """Read in this pass so far, or in the last one."""
        self.count = 0
        """Batches, likewise."""
        self._batches, self._device, self._dtype, self._limit = batches, device, dtype, limit
        self._labels, self._budget = labels, budget
        self._progress, self._total, self._what = progress, total or limit or 0, what
        self._digest = hashlib.sha256() if hashed else None
        self._size: int | None = None  # examples of a whole pass
        self._in_memory: list[Batch] | None = None

    @property
    def sha256(self) -> str:
        """Of the names and bytes of everything that was read."""
        assert self._digest is not None, "made with hashed=False"
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        self.examples = self.count = 0
        if self._digest is not None and self._size is None:
            self._digest = hashlib.sha256()  # a pass before this one may have ended early
        kept: list[Batch] | None = []
        held = 0
        for batch in self._fresh() if self._in_memory is None else self._in_memory:
            self.examples += examples_in(batch)
            self.count += 1
            held += sum(tensor.nbytes for tensor in batch.values())
            if kept is not None and held <= self._budget:
                kept.append(batch)
            else:
                kept = None
            yield batch
            if self._progress:
                self._progress(self.examples, max(self.examples, self._total), self._what)
        self._require_same_size()
        self._in_memory = self._in_memory or kept or None

    def first(self, count: int = 2) -> Batch:
        """A few examples of the first batch, to see how a model runs."""
        for batch in self._in_memory or self._fresh(hashed=False):
            return {name: tensor[:count] for name, tensor in batch.items()}
        raise _no_batch()

    def _fresh(self, *, hashed: bool = True) -> Iterator[Batch]:
        left = self._limit
        for batch in self._batches():
            size = examples_in(batch)
            if left is not None and size > left:
                size = left
                batch = {name: tensor[:size] for name, tensor in batch.items()}
            if size == 0:
                return
            left = None if left is None else left - size
            if not self._labels:
                batch = {name: tensor for name, tensor in batch.items() if name != "labels"}
            if hashed and self._digest is not None and self._size is None:
                self._hash(batch, size)
            yield {name: self._moved(tensor) for name, tensor in batch.items()}

    def _hash(self, batch: Batch, size: int) -> None:
        """By example, so that the same data in batches of another size have the same hash."""
        assert self._digest is not None
        for example in range(size):
            for name in sorted(batch):
                self._digest.update(name.encode())
                self._digest.update(raw_bytes(batch[name][example].cpu().contiguous()))

    def _moved(self, tensor: Tensor) -> Tensor:
        device = self._device or tensor.device
        if self._dtype is not None and tensor.is_floating_point():
            return tensor.to(device, self._dtype)
        return tensor.to(device)

    def _require_same_size(self) -> None:
        if self.examples == 0:
            raise _no_batch()
        if self._size not in (None, self.examples):
            raise RequestError(
                f"Reading data: there were {self._size} examples the first time and {self.examples} now. A function "
                "that gives batches is called once per pass and must give the same batches in the same order."
            )
        self._size = self.examples


def as_batches(
    data: Any,
    checkpoint: Checkpoint,
    *,
    limit: int | None = None,
    labels: bool = False,
    seed: int = 0,
    device: str = "cpu",
    batch_size: int = BATCH_SIZE,
) -> Batches:
    """Batches of an opened data set (`isomerge.data.Data`) for a model; a function that gives batches stays."""
    if not hasattr(data, "passes"):
        return data  # type: ignore[no-any-return]
    return data.passes(  # type: ignore[no-any-return]
        checkpoint, batch_size=batch_size, limit=limit, labels=labels, seed=seed, device=device
    )


def examples_in(batch: Batch) -> int:
    """How many examples a batch holds."""
    sizes = {name: tensor.shape[0] for name, tensor in batch.items() if tensor.ndim}
    if not sizes or len(set(sizes.values())) > 1:
        raise RequestError(
            f"Reading data: a batch has the lengths {sizes or 'of nothing'}. Every tensor of a batch needs one row per "
            "example."
        )
    return next(iter(sizes.values()))


def _no_batch() -> RequestError:
    return RequestError("Reading data: there is not one batch. Check the path, the split and the limit.")
