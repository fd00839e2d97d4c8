"""Batches that somebody else made: a list, a loader, or a function that gives a fresh iterator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint
from isomerge.data.base import Batch, Data, Wanted
from isomerge.errors import RequestError


class ReadyData(Data):
    """Taken as they are: no preprocessing, no shuffling; `limit` takes the first examples."""

    kind = "batches"

    def __init__(self, batches: Iterable[Batch] | Callable[[], Iterable[Batch]], name: str = "ready batches") -> None:
        super().__init__()
        self.name, self.classes = name, None
        if callable(batches):
            self._again = batches
        else:
            # An iterator can be gone through once, and everything here is gone through several times.
            kept = list(batches) if isinstance(batches, Iterator) else batches
            self._again = lambda: kept

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return sum(_length(batch) for batch in self._checked())

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]
        digest = hashlib.sha256()
        for batch in self._checked():
            for key in sorted(batch):
                value = batch[key].detach().cpu().contiguous()
                digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(value.view(torch.uint8).numpy().tobytes() if value.dim() else str(value.item()).encode())
        return digest.hexdigest()

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        left = wanted.limit
        for batch in self._checked():
            count = _length(batch) if left is None else min(left, _length(batch))
            if count == 0:
                return
            left = None if left is None else left - count
            yield {k: v[:count].to(wanted.device) for k, v in batch.items() if wanted.labels or k != "labels"}

    def _checked(self) -> Iterator[Batch]:
        number = -1
        for number, batch in enumerate(self._again()):
            yield _plain(batch, number)
        if number < 0:
            raise RequestError(f"Reading {self.name}: there is not one batch. Pass at least one.")


def _plain(batch: Any, number: int) -> Batch:
    good = hasattr(batch, "items") and batch and all(isinstance(v, torch.Tensor) for v in dict(batch).values())
    if not good:
        raise RequestError(
            f"Reading batch {number}: a {type(batch).__name__} is not a mapping of names to tensors, as "
            "{'input_ids': …, 'attention_mask': …}. Pass the keyword arguments of the model's forward."
        )
    lengths = {len(value) for value in batch.values()}
    if len(lengths) != 1:
        raise RequestError(f"Reading batch {number}: its tensors hold {sorted(lengths)} examples. Make them agree.")
    return dict(batch)


def _length(batch: Batch) -> int:
    return len(next(iter(batch.values())))
