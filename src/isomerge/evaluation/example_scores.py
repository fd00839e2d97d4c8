"""What every example scored: how sure a mean is, and how sure the difference of two models on the same examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomerge.data.base import Batch, Batches
from isomerge.evaluation.tasks import ScoredRows

DIGITS = 7
"""Significant ones that are kept of a loss: those of the float32 it was computed in."""


@dataclass(frozen=True)
class ExampleScores:
    """One entry per example. A text has several predictions, which are not independent: it counts as one."""

    losses: np.ndarray
    """The sum over the example's predictions."""
    counts: np.ndarray
    right: np.ndarray | None
    """How many of them are the right class; None where predictions are not classes."""

    @classmethod
    def of(cls, rows: Sequence[ScoredRows], counts: Sequence[Tensor]) -> ExampleScores:
        """From predictions in their order, and how many of them each example has."""
        each = torch.cat(list(counts))
        owner = torch.arange(len(each)).repeat_interleave(each)

        def by_example(parts: Sequence[Tensor]) -> np.ndarray:
            total = torch.zeros(len(each), dtype=torch.float64)
            return total.index_add_(0, owner, torch.cat(list(parts)).double()).numpy()

        classes = [right for _, right in rows if right is not None]
        right = by_example(classes) if len(classes) == len(rows) else None
        return cls(_rounded(by_example([losses for losses, _ in rows])), each.numpy().astype(float), right)

    def error(self, by: str) -> float | None:
        """The standard error of the mean loss, or of the accuracy; None where that cannot be told."""
        values = self._values(by)
        return None if values is None else _error(values, self.counts)

    def gain_over(self, other: ExampleScores, by: str) -> tuple[float, float] | None:
        """How much lower the mean loss is than another's, or how much higher the accuracy, and the standard error of
        that: the pairs are the same examples. None where they are not, or cannot be told."""
        own, others = self._values(by), other._values(by)
        if own is None or others is None or not self.aligned(other):
            return None
        better = own - others if by == "metric" else others - own
        return float(better.sum() / self.counts.sum()), _error(better, self.counts)

    def aligned(self, other: ExampleScores) -> bool:
        """Whether both are of the same examples, cut into the same predictions."""
        return np.array_equal(self.counts, other.counts)

    def _values(self, by: str) -> np.ndarray | None:
        return self.right if by == "metric" else self.losses

    def saved(self) -> dict[str, Any]:
        return {
            "losses": self.losses.tolist(),
            "counts": self.counts.tolist(),
            "right": None if self.right is None else self.right.tolist(),
        }

    @classmethod
    def read(cls, saved: dict[str, Any]) -> ExampleScores:
        right = saved["right"]
        return cls(
            np.array([math.nan if x is None else x for x in saved["losses"]], dtype=float),
            np.array(saved["counts"], dtype=float),
            None if right is None else np.array(right, dtype=float),
        )


def _error(values: np.ndarray, counts: np.ndarray) -> float:
    """The standard error of Σ values / Σ counts, whose parts are the examples; of one it is not known (NaN).

    >>> bool(_error(np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4)) == np.std([1, 2, 3, 4], ddof=1) / 2)
    True
    """
    n = len(values)
    if n < 2:
        return math.nan
    residuals = values - counts * (values.sum() / counts.sum())
    return float(math.sqrt(n / (n - 1) * (residuals**2).sum()) / counts.sum())


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.array([float(f"{value:.{DIGITS}g}") for value in values.tolist()])


@dataclass(frozen=True)
class EveryNth:
    """One part of data that has no parts: every so many-th example is held out, or all others are used."""

    every: int
    held: bool

    def of(self, batches: Batches) -> Batches:
        def part() -> Iterator[Batch]:
            start = 0
            for batch in batches():
                count = len(next(iter(batch.values())))
                number = torch.arange(start, start + count)
                keep = (number % self.every == self.every - 1) == self.held
                start += count
                if bool(keep.any()):
                    yield {name: tensor[keep.to(tensor.device)] for name, tensor in batch.items()}

        return part
