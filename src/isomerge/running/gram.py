"""Sums over rows of activations in float64, whose memory does not grow with the data."""

from __future__ import annotations

import torch
from torch import Tensor


class GramSums:
    """Number of rows, Σ x (`total`) and Σ x xᵀ (`product`). `width` is only needed where no row may come.

    With `centred`, x counts from the mean of the first rows (`origin`): sums about a point near the mean keep the
    digits that taking the mean away from plain sums would lose.
    """

    def __init__(self, width: int = 0, *, centred: bool = False) -> None:
        self.count = 0
        self._centred = centred
        self._start(torch.zeros(1, width, dtype=torch.float64))

    def _start(self, rows: Tensor) -> None:
        width = rows.shape[1]
        self.origin = rows.mean(0) if self._centred else None
        self.total, self.product = rows.new_zeros(width), rows.new_zeros(width, width)

    def add(self, rows: Tensor) -> None:
        """Rows (n, width) of float64, or of what is made so here."""
        rows = rows.double()
        if self.count == 0:
            self._start(rows)
        if self.origin is not None:
            rows = rows - self.origin
        self.count += len(rows)
        self.total += rows.sum(0)
        self.product.addmm_(rows.T, rows)

    def mean(self) -> Tensor:
        mean = self.total / self.count
        return mean if self.origin is None else self.origin + mean

    def products(self) -> Tensor:
        """Σ x xᵀ, or Σ (x − mean)(x − mean)ᵀ if `centred`."""
        return self.product - torch.outer(self.total, self.total) / self.count if self._centred else self.product


class UnitSums:
    """Number of rows, Σ y (`total`) and Σ y² (`squares`) of every unit; rows may count in part."""

    def __init__(self) -> None:
        self.count = 0.0
        self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor, shares: Tensor | None = None) -> None:
        rows = rows.double()
        if self.count == 0:
            self.total, self.squares = rows.new_zeros(rows.shape[1:]), rows.new_zeros(rows.shape[1:])
        own = None if shares is None else shares.double()[:, None]
        self.count += len(rows) if own is None else float(own.sum())
        self.total += (rows if own is None else rows * own).sum(0)
        self.squares += (rows.square() if own is None else rows.square() * own).sum(0)

    def mean(self) -> Tensor:
        return self.total / self.count

    def spread(self) -> Tensor:
        return (self.squares / self.count - self.mean().square()).clamp(min=0).sqrt()
