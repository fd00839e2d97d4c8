"""Which mixture of vertices a point is. The first two vertices are the models A and B, those that learned follow."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isomerge.errors import RequestError

Shares = list[float]
"""Of every vertex, in their order; they add up to one."""
TOLERANCE = 1e-6
"""By as much may weights that somebody typed miss a sum of one."""


class Shape(ABC):
    """A set of mixtures with a curve through it, t = 0 … 1."""

    vertices: int

    @abstractmethod
    def shares(self, t: float) -> Shares: ...

    def point(self, coordinates: Sequence[float]) -> Shares:
        """By one number t, or in a simplex by a weight for each vertex."""
        if len(coordinates) != 1:
            raise RequestError(
                f"Taking the point {list(coordinates)} of a curve: it has one coordinate, t. Name a number from 0 to "
                "1, or use a simplex.",
                keys=("point",),
            )
        if not 0 <= coordinates[0] <= 1:
            raise RequestError(
                f"Taking the point {coordinates[0]:g} of a curve: t goes from 0 to 1. Name a number between them.",
                keys=("point",),
            )
        return self.shares(coordinates[0])


@dataclass(frozen=True)
class BezierCurve(Shape):
    """Σ_k C(n, k) (1 − t)^(n − k) t^k P_k, with P_0 = A, P_n = B and what learned in between.

    >>> BezierCurve(3).shares(0.5)
    [0.25, 0.25, 0.5]
    """

    vertices: int

    def shares(self, t: float) -> Shares:
        n = self.vertices - 1
        first, *between, last = (math.comb(n, k) * (1 - t) ** (n - k) * t**k for k in range(n + 1))
        return [first, last, *between]


@dataclass(frozen=True)
class PolygonalChain(Shape):
    """Straight from knot to knot: A at t = 0, then what learned, B at t = 1.

    >>> PolygonalChain((0.0, 0.5, 1.0)).shares(0.25)
    [0.5, 0.0, 0.5]
    """

    knots: tuple[float, ...]

    @classmethod
    def even(cls, pivots: int) -> PolygonalChain:
        return cls(tuple(k / (pivots + 1) for k in range(pivots + 2)))

    @property
    def vertices(self) -> int:  # type: ignore[override]
        return len(self.knots)

    def shares(self, t: float) -> Shares:
        left = min(bisect_right(self.knots, t) - 1, len(self.knots) - 2)
        share = (t - self.knots[left]) / (self.knots[left + 1] - self.knots[left])
        along = [0.0] * len(self.knots)
        along[left], along[left + 1] = 1 - share, share
        first, *between, last = along
        return [first, last, *between]


@dataclass(frozen=True)
class SimplicialComplex(Shape):
    """Simplexes that share vertices. Their curve goes from one of two ends straight to the mean of the shared vertices,
    and straight on to the other.

    >>> SimplicialComplex(3, ((0, 2), (1, 2)), (0, 1)).shares(0.25)
    [0.5, 0.0, 0.5]
    """

    vertices: int
    simplexes: tuple[tuple[int, ...], ...]
    ends: tuple[int, int]

    @property
    def used(self) -> list[int]:
        """The vertices that are in a simplex: what a point has weights for."""
        return sorted({vertex for simplex in self.simplexes for vertex in simplex})

    def shares(self, t: float) -> Shares:
        shared = [v for v in self.used if all(v in simplex for simplex in self.simplexes)]
        end, far = (self.ends[0], 1 - 2 * t) if t <= 0.5 else (self.ends[1], 2 * t - 1)
        found = [0.0] * self.vertices
        for vertex in shared:
            found[vertex] = (1 - far) / len(shared)
        found[end] += far
        return found

    def point(self, coordinates: Sequence[float]) -> Shares:
        if len(coordinates) == 1:
            return super().point(coordinates)
        if len(coordinates) != len(self.used):
            raise RequestError(
                f"Taking the point {list(coordinates)} of a simplex: it has {len(self.used)} vertices. Name one weight "
                "for each, or one number t.",
                keys=("point",),
            )
        if min(coordinates) < 0 or abs(sum(coordinates) - 1) > TOLERANCE:
            raise RequestError(
                f"Taking the point {list(coordinates)} of a simplex: weights are 0 or more and add up to 1.",
                keys=("point",),
            )
        found = [0.0] * self.vertices
        for vertex, weight in zip(self.used, coordinates, strict=True):
            found[vertex] = weight
        inside = {vertex for vertex, weight in enumerate(found) if weight > 0}
        if not any(inside <= set(simplex) for simplex in self.simplexes):
            raise RequestError(
                f"Taking the point {list(coordinates)}: no simplex has all these vertices; A and B are in two that "
                "share the others. Give one of the two a weight of 0.",
                keys=("point",),
            )
        return found

    def sample(self, draw: torch.Generator) -> Shares:
        """A point drawn evenly from a simplex that is drawn first (Dirichlet with all parameters 1)."""
        simplex = self.simplexes[int(torch.randint(len(self.simplexes), (), generator=draw))]
        sizes = -torch.rand(len(simplex), generator=draw, dtype=torch.float64).log()
        found = [0.0] * self.vertices
        for vertex, weight in zip(simplex, (sizes / sizes.sum()).tolist(), strict=True):
            found[vertex] = weight
        return found
