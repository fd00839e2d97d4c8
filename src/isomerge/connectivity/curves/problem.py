"""What a method gets and gives: it trains vertices of a space, and says which mixture of them a point is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.connectivity.curves.goals import Goal
from isomerge.connectivity.curves.shapes import Shape, Shares
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.connectivity.curves.volume import Point
from isomerge.data.base import Batch
from isomerge.running.gradient_descent import descend


@dataclass
class CurveProblem:
    """Two models, what is to be low between them, and how much work that may take."""

    space: WeightSpace
    goal: Goal
    batches: Iterator[Batch]
    """Over and over."""
    steps: int
    """Batches in all, however many vertices learn."""
    rate: float
    seed: int
    pivots: int
    spread: float
    report: Callable[[int, int, str], None] | None = None
    losses: list[float] = field(default_factory=list)
    """Of every step."""

    def __post_init__(self) -> None:
        self.draw = generator(self.seed)

    def descend(
        self, vertices: Sequence[Point], loss: Callable[[Batch], Tensor], steps: int, rate: float | None = None
    ) -> None:
        """Lower a loss by so many of the steps."""

        def noted(batch: Batch) -> Tensor:
            value = loss(batch)
            self.losses.append(float(value.detach()))
            if self.report:
                self.report(len(self.losses), self.steps, "training")
            return value

        descend(self.space.parameters(vertices), noted, self.batches, steps, self.rate if rate is None else rate)

    def loss(self, shares: Shares, vertices: Sequence[Point], batch: Batch, parents: tuple[float, float]) -> Tensor:
        """Of a point among the fixed vertices and these."""
        weights = self.space.mix(shares, [*self.space.vertices, *vertices])
        return self.goal.loss(weights, parents, batch)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.draw, dtype=torch.float64))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & (2**63 - 1))


@dataclass(frozen=True)
class Trained:
    """The points by their shape, and what the method has to say."""

    shape: Shape
    details: dict[str, Any] = field(default_factory=dict)


def expected_loss(problem: CurveProblem, shape: Shape) -> Trained:
    """Train what lies between A and B on a curve, from the straight line on: min E_{t ~ U(0, 1)} L(φ(t))."""
    space = problem.space
    pivots = [space.start([1 - t, t]) for t in (k / (problem.pivots + 1) for k in range(1, problem.pivots + 1))]

    def loss(batch: Batch) -> Tensor:
        t = problem.uniform()
        return problem.loss(shape.shares(t), pivots, batch, (1 - t, t))

    problem.descend(pivots, loss, problem.steps)
    space.keep(pivots)
    return Trained(shape)
