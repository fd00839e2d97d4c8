"""AutoNEB: a chain whose pivots go down across it, with new pivots where it stays high (Draxler et al. 2018,
arXiv 1803.00885).

    step at pivot p with tangent τ:   p ← p − rate · (∇L − ⟨∇L, τ⟩ τ)
    τ points to the neighbour with the higher loss; springs are stiff: pivots are put back at even distances

After each cycle the loss is measured between neighbours, and a pivot is inserted at the highest place of every part
that rises above the straight line of its ends by more than a fifth of the range of losses on the path. The paper steps
by SGD at all pivots at once; here Adam steps at one pivot after the other, so a step is one batch as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from isomerge.connectivity.curves.problem import CurveProblem, Trained
from isomerge.connectivity.curves.shapes import PolygonalChain
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.connectivity.curves.volume import Point, inner
from isomerge.data.base import Batch

CYCLES = 4
BETWEEN = 3
"""Places between two pivots at which a cycle ends by measuring."""
LOOKS = 2
"""Batches it measures them on."""
THRESHOLD = 0.2


def autoneb(problem: CurveProblem) -> Trained:
    space, cycles = problem.space, []
    band = Band(problem, [space.start([1 - t, t]) for t in _even(problem.pivots)])
    for cycle in range(CYCLES):
        steps = (problem.steps * (cycle + 1)) // CYCLES - (problem.steps * cycle) // CYCLES
        problem.descend(band.pivots, band.loss, steps, problem.rate * (CYCLES - cycle) / CYCLES)
        band.spread_out()
        losses = band.measured()
        inserted = highest_places(losses, BETWEEN) if cycle + 1 < CYCLES else []
        cycles.append({"pivots": len(band.pivots), "highest": max(losses), "inserted_at": band.positions(inserted)})
        band.insert(inserted)
    space.keep(band.pivots)
    return Trained(PolygonalChain(tuple(knots(band.whole()))), {"cycles": cycles})


class Band:
    """The pivots, and the losses last seen at them."""

    def __init__(self, problem: CurveProblem, pivots: list[Point]) -> None:
        self.problem, self.pivots = problem, pivots
        self._seen: dict[int, float] = {}
        self._turn = 0

    def whole(self) -> list[Point]:
        first, last = self.problem.space.vertices[:2]
        return [first, *self.pivots, last]

    def loss(self, batch: Batch) -> Tensor:
        """At the pivot whose turn it is, with no gradient along the path."""
        place = self._turn % len(self.pivots)
        if place == 0:
            self.spread_out()
        self._turn += 1
        band = self.whole()
        t = (place + 1) / (len(band) - 1)
        flat = across(band[place + 1], self._tangent(band, place + 1), self.problem.space.learned)
        value = self.problem.goal.loss(flat, (1 - t, t), batch)
        self._seen[place + 1] = float(value.detach())
        return value

    @torch.no_grad()
    def _tangent(self, band: Sequence[Point], place: int) -> Point:
        before, after = (self._seen.get(place + side, -math.inf) for side in (-1, 1))
        one, other = (place, place + 1) if after > before else (place - 1, place)
        return {name: band[other][name] - band[one][name] for name in self.problem.space.learned}

    @torch.no_grad()
    def spread_out(self) -> None:
        """Move the pivots along the chain to even distances."""
        band = self.whole()
        chain = PolygonalChain(tuple(knots(band)))
        moved = [_at(self.problem.space, chain, t, band) for t in _even(len(self.pivots))]
        for pivot, new in zip(self.pivots, moved, strict=True):
            for name, tensor in pivot.items():
                tensor.copy_(new[name])

    @torch.no_grad()
    def measured(self) -> list[float]:
        """The loss at every pivot, both ends and the places between them, all on the same batches."""
        band, space = self.whole(), self.problem.space
        chain = PolygonalChain.even(len(self.pivots))
        batches = [next(self.problem.batches) for _ in range(LOOKS)]
        count = (len(band) - 1) * (BETWEEN + 1)
        losses = []
        for place in range(count + 1):
            t = place / count
            point = _at(space, chain, t, band)
            losses.append(sum(_value(self.problem, point, t, batch) for batch in batches) / LOOKS)
        return losses

    def insert(self, places: Sequence[int]) -> None:
        """New pivots at places as `measured` counts them; the pivots that were there stay."""
        band, space = self.whole(), self.problem.space
        chain = PolygonalChain.even(len(self.pivots))
        count = (len(band) - 1) * (BETWEEN + 1)
        old = {(number + 1) * (BETWEEN + 1): pivot for number, pivot in enumerate(self.pivots)}
        new = {place: {n: t.clone() for n, t in _at(space, chain, place / count, band).items()} for place in places}
        self.pivots = [pivot for _, pivot in sorted((old | new).items(), key=lambda entry: entry[0])]
        self._seen.clear()
        self._turn = 0

    def positions(self, places: Sequence[int]) -> list[float]:
        return [place / ((len(self.pivots) + 1) * (BETWEEN + 1)) for place in places]


def highest_places(losses: Sequence[float], between: int) -> list[int]:
    """Where to insert pivots: one for each part between neighbours, at its highest rise above their straight line, if
    that is more than a fifth of the range of all losses. Every (between + 1)-th loss is a pivot's.

    >>> highest_places([0.0, 2.0, 5.0, 1.0, 0.0, 0.1, 0.1, 0.1, 0.0], between=3)
    [2]
    """
    found, part = [], between + 1
    least = THRESHOLD * (max(losses) - min(losses))
    for start in range(0, len(losses) - 1, part):
        ends = losses[start], losses[start + part]
        rises = {k: losses[start + k] - (ends[0] * (part - k) + ends[1] * k) / part for k in range(1, part)}
        best = max(rises, key=lambda k: rises[k])
        if rises[best] > least:
            found.append(start + best)
    return found


def across(point: Point, tangent: Point, names: Sequence[str]) -> Point:
    """The point itself, whose gradient has nothing along the tangent: p₀ + (1 − ττᵀ)(p − p₀) at p = p₀."""
    moves = {name: point[name] - point[name].detach() for name in names}
    length = inner(tangent, tangent)
    along = inner(moves, tangent) / length if float(length) > 0 else length
    return {
        name: tensor.detach() + moves[name] - along.to(tensor) * tangent[name] if name in moves else tensor
        for name, tensor in point.items()
    }


def knots(band: Sequence[Point]) -> list[float]:
    """How far along the chain each vertex is, from 0 to 1."""
    with torch.no_grad():
        parts = [float(inner(step, step)) ** 0.5 for step in ({n: b[n] - a[n] for n in a} for a, b in pairwise(band))]
    total = sum(parts)
    if not min(parts) > 0:
        return [k / (len(band) - 1) for k in range(len(band))]
    return [0.0, *(so_far / total for so_far in accumulate(parts[:-1])), 1.0]


def _even(pivots: int) -> list[float]:
    return [k / (pivots + 1) for k in range(1, pivots + 1)]


def _at(space: WeightSpace, chain: PolygonalChain, t: float, band: Sequence[Point]) -> Point:
    first, last, *between = chain.shares(t)
    return space.mix([first, *between, last], band)


def _value(problem: CurveProblem, point: Point, t: float, batch: Batch) -> float:
    return float(problem.goal.loss(point, (1 - t, t), batch))
