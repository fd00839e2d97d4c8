"""What every data set offers, whatever it was read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isomerge.arguments import require_types
from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.checkpoint.stamp import Stamp
from isomerge.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from isomerge.data.encode import Encoder

Batch = dict[str, torch.Tensor]
"""Keyword arguments of a stock class's forward."""
Batches = Callable[[], Iterator[Batch]]
"""A fresh pass over the same batches at every call."""

DataSource = Any
"""What names data: a path, a mapping with a path and `DataOptions`, opened data, a `datasets` object, or batches (a
list, a loader, or a function that gives a fresh iterator)."""

KEPT = 200 << 20  # bytes of decoded or tokenised data that may stay in memory between passes


@dataclass(frozen=True)
class Wanted:
    """Which batches."""

    batch_size: int = 64
    limit: int | None = None
    """So many examples, drawn evenly over the data."""
    labels: bool = False
    """Added where the data has them."""
    seed: int = 0
    """Names the examples that are drawn and their order."""
    device: str = "cpu"
    task: str | None = None
    """What the model's class is for, unless another is named."""

    def __post_init__(self) -> None:
        require_types(batch_size=(self.batch_size, int), limit=(self.limit, int, None), seed=(self.seed, int))
        if self.limit is not None and self.limit < 1:
            raise RequestError(
                f"Drawing {self.limit} examples: at least one is needed. Leave limit out to use them all.",
                keys=("limit",),
            )

    def order(self, size: int) -> Iterator[np.ndarray]:
        """The numbers of the examples of each batch."""
        return grouped(draw(size, self.limit, self.seed), self.batch_size)


@dataclass(frozen=True)
class Content:
    """One example as it is, apart from any model."""

    value: np.ndarray | str
    """A text, or the uint8 pixels (3, edge, edge) of a small picture."""
    label: str | None
    """The name of its class, where it has exactly one."""


class Data(ABC):
    """Examples in a fixed order, made into batches as a model's own tokenizer or image settings say."""

    name: str
    """Where it came from, for messages and records."""
    kind: str
    """"images", "texts", "pairs", "tokens" (tagged words), "corpus" (running text) or "batches"."""
    size: int
    """How many examples; of running text, how many lines."""
    classes: list[str] | None
    """The labels that occur, None where there are none or they are numbers to predict."""
    limit: int | None = None
    """How many examples to use where nobody asks for another number; None: all."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What a reader of the numbers should know: guesses that were made, examples cut short."""
        self.stamps: Mapping[Path, Stamp | None] = {}
        """Its files as they were when it was opened; none of data that was given as an object."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Of the content that is used, with its labels."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        """Batches for this model, the same at every call."""

    def batches(
        self,
        checkpoint: Checkpoint,
        *,
        batch_size: int = 64,
        limit: int | None = None,
        labels: bool = False,
        seed: int = 0,
        device: str = "cpu",
        task: str | None = None,
    ) -> Iterator[Batch]:
        """Batches for this model, the same at every call; `Wanted` explains the settings."""
        return self._watched(
            checkpoint, Wanted(batch_size, self.limit if limit is None else limit, labels, seed, device, task)
        )

    def _watched(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        """One pass, all of it over the files that were opened."""
        yield from self.read(checkpoint, wanted)
        changed = self.changed()
        if changed:
            raise CheckpointError(
                f"While reading data {self.name}: {name_some([str(path) for path in changed])} changed while it was "
                "being read, so the result would be a mix of old and new. Wait until nobody writes there, then run "
                "again."
            )

    def changed(self) -> list[Path]:
        """The files that are not those that were opened."""
        return [path for path, stamp in self.stamps.items() if Stamp.of(path) != stamp]

    def passes(
        self,
        checkpoint: Checkpoint,
        *,
        batch_size: int = 64,
        limit: int | None = None,
        labels: bool = False,
        seed: int = 0,
        device: str = "cpu",
        task: str | None = None,
    ) -> Batches:
        """`batches`, to be gone through several times: what fits in memory is prepared once."""
        limit = self.limit if limit is None else limit
        wanted = Wanted(batch_size, limit, labels, seed, device, task)
        kept: list[Batch] | None = None

        def one_pass() -> Iterator[Batch]:
            nonlocal kept
            if kept is not None:
                yield from kept
                return
            prepared: list[Batch] = []
            used = 0
            for batch in self._watched(checkpoint, wanted):
                used += sum(tensor.nbytes for tensor in batch.values())
                if used <= KEPT:
                    prepared.append(batch)
                else:
                    prepared.clear()
                yield batch
            if used <= KEPT:
                kept = prepared

        return one_pass

    def as_texts(self, checkpoint: Checkpoint) -> tuple[Encoder, list[str]]:
        """A model's tokenizer, and plain texts that several models can read, each with its own."""
        raise RequestError(
            f"Reading {self.name} with the tokenizers of several models: {self.kind} are not plain texts. Give a file "
            "of texts, so that every model reads it in its own tokens.",
            keys=("data",),
        )

    def contents(self, limit: int | None = None, seed: int = 0) -> Iterator[Content]:
        """Examples for what no model decides, in the order in which `batches` without labels gives them."""
        raise RequestError(
            f"Reading {self.name} apart from a model: {self.kind} are made for one. Give images or texts.",
            keys=("data",),
        )

    def used(self, limit: int | None = None) -> int:
        """How many examples are used, with this limit or its own."""
        limit = self.limit if limit is None else limit
        return self.size if limit is None else min(limit, self.size)

    def describe(self) -> dict[str, Any]:
        """What records say of it."""
        return {"name": self.name, "sha256": self.sha256, "size": self.size, "kind": self.kind}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.size} {self.kind})"


def draw(size: int, limit: int | None, seed: int) -> np.ndarray:
    """Which examples, in which order: one from each of `limit` equal stretches, shuffled. The seed names both.

    Files are often sorted by class, so neither the first examples nor neighbours would do.

    >>> sorted((draw(10, 5, seed=0) // 2).tolist())
    [0, 1, 2, 3, 4]
    """
    random = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
    if limit is None or limit >= size:
        return random.permutation(size)
    edges = np.arange(limit + 1) * size // limit
    return random.permutation(edges[:-1] + random.integers(0, np.diff(edges)))


def grouped(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    if batch_size < 1:
        raise RequestError(f"Making batches of {batch_size}: at least one example is needed in each.")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def floating(checkpoint: Checkpoint) -> torch.dtype:
    """Models stored in float64 compute in float64, all others in float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in checkpoint.tensors.values()) else torch.float32
