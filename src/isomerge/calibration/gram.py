"""Gram matrices: Σ x xᵀ, Σ x and the number of samples for the input of every linear map."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isomerge.calibration.experts import listen_to_experts
from isomerge.calibration.maps import LinearMap
from isomerge.calibration.watch import SameInput, Watch


@dataclass
class Sums:
    """Over rows of activations, in float64."""

    count: int
    total: Tensor
    """Σ x"""
    product: Tensor
    """Σ x xᵀ"""

    @classmethod
    def empty(cls, width: int, device: str) -> Sums:
        total = torch.zeros(width, dtype=torch.float64, device=device)
        return cls(0, total, torch.zeros(width, width, dtype=torch.float64, device=device))

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.product.addmm_(rows.T, rows)


class GramPass:
    """Listens to the linear maps of a watched model. Maps that read the same tensor share one matrix."""

    def __init__(self, watch: Watch, weights: Collection[str] | None = None) -> None:
        self.sums: dict[str, Sums] = {}
        self.maps: dict[str, LinearMap] = {}
        self._watch, self._same = watch, SameInput()
        for linear in watch.stock.maps():
            if weights is None or linear.weight in weights:
                self.maps[linear.weight] = linear
                self._listen(linear)
        self.maps |= listen_to_experts(watch, self._add, weights)

    @property
    def same(self) -> dict[str, str]:
        """From a map to an earlier one with the same input."""
        return {name: owner for name, owner in self._same.owner_of.items() if owner != name}

    def _listen(self, linear: LinearMap) -> None:
        def look(module: nn.Module, given: Tensor, made: Tensor) -> Tensor | None:
            own = self._same.owner(linear.weight, given) == linear.weight
            return linear.rows_in(module, given) if own else None

        self._watch.listen(linear.module, linear.weight, look, lambda rows: self._add(linear.weight, rows))

    def _add(self, name: str, rows: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = Sums.empty(rows.shape[1], self._watch.stock.device)
        self.sums[name].add(rows)
