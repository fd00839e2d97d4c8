"""Sums over rows of activations in float64, whose memory does not grow with the data."""

from __future__ import annotations

import torch
from torch import Tensor


class GramSums:
    """Number of rows, Σ x (`total`) and Σ x xᵀ (`product`). `width` is only needed where no row may come."""

    def __init__(self, width: int = 0) -> None:
        self.count = 0
        self.total, self.product = (torch.zeros(*shape, dtype=torch.float64) for shape in ((width,), (width, width)))

    def add(self, rows: Tensor) -> None:
        """Rows (n, width) of float64, or of what is made so here."""
        rows = rows.double()
        if self.count == 0:
            width = rows.shape[1]
            self.total, self.product = rows.new_zeros(width), rows.new_zeros(width, width)
        self.count += len(rows)
        self.total += rows.sum(0)
        self.product.addmm_(rows.T, rows)


class UnitSums:
    """Number of rows, Σ y (`total`) and Σ y² (`squares`) of every unit."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        if self.count == 0:
            self.total, self.squares = rows.new_zeros(rows.shape[1:]), rows.new_zeros(rows.shape[1:])
        self.count += len(rows)
        self.total += rows.sum(0)
        self.squares += rows.square().sum(0)
