"""Sums over rows of activations in float64, whose memory does not grow with the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def zeros(*shape: int, device: str) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64, device=device)


@dataclass
class GramSums:
    """Number of rows, Σ x and Σ x xᵀ."""

    count: int
    total: Tensor
    """Σ x"""
    product: Tensor
    """Σ x xᵀ"""

    @classmethod
    def empty(cls, width: int, device: str) -> GramSums:
        return cls(0, zeros(width, device=device), zeros(width, width, device=device))

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.product.addmm_(rows.T, rows)


class UnitSums:
    """Number of rows, Σ y and Σ y² of every unit."""

    def __init__(self, device: str) -> None:
        self.count = 0
        self.total = self.squares = zeros(0, device=device)

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        if self.count == 0:
            self.total, self.squares = (torch.zeros_like(rows[0]) for _ in range(2))
        self.count += len(rows)
        self.total += rows.sum(0)
        self.squares += rows.square().sum(0)
