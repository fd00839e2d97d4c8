"""Sums over samples of two models: distance, cosine, sign conflict and size, for a layer or for all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Sums:
    """Σ over weights; sampled ones count for those they stand for."""

    apart: float = 0.0  # ‖A − B‖²
    first: float = 0.0  # ‖A‖²
    second: float = 0.0
    product: float = 0.0  # ⟨A, B⟩
    conflict: float = 0.0  # weights whose signs differ
    nonzero: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float = 1.0) -> Sums:
        both = a.sign() * b.sign()  # their product may be too small to have a sign
        return cls(
            apart=scale * squared(a - b),
            first=scale * squared(a),
            second=scale * squared(b),
            product=scale * product(a, b),
            conflict=scale * int((both < 0).sum()),
            nonzero=scale * int((both != 0).sum()),
            count=scale * a.numel(),
        )

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{key: getattr(self, key) + getattr(other, key) for key in self.__dataclass_fields__})

    @property
    def distance(self) -> float:
        """Relative: 0 for the same weights, √2 for weights that have nothing to do with each other."""
        size = self.first + self.second
        return math.sqrt(2 * self.apart / size) if size else 0.0

    @property
    def cosine(self) -> float | None:
        size = math.sqrt(self.first * self.second)
        return self.product / size if size else None

    @property
    def sign_conflict(self) -> float:
        """Of all weights, those with different signs: one half between strangers."""
        return self.conflict / self.count if self.count else 0.0

    @property
    def changed_conflict(self) -> float | None:
        """Of task vectors: among weights that both changed, those changed in opposite directions."""
        return self.conflict / self.nonzero if self.nonzero else None

    @property
    def norm_ratio(self) -> float | None:
        return math.sqrt(self.first / self.second) if self.second else None

    def record(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("distance", "cosine", "sign_conflict", "norm_ratio")}


def squared(tensor: Tensor) -> float:
    return product(tensor, tensor)


def product(a: Tensor, b: Tensor) -> float:
    """Without a third tensor in memory; in float64 where float32 has no room for it."""
    a, b = a.reshape(-1), b.reshape(-1)
    found = float(torch.dot(a, b))
    return found if found and math.isfinite(found) else float(torch.dot(a.double(), b.double()))
