"""A geodesic: the shortest path between two models as functions (Tan et al. 2023, arXiv 2308.12666).

The distance of two neighbouring points is that of their predictions. For classes and tokens it is that of Fisher and
Rao, for which the Jensen–Shannon divergence stands where points are near: ds² = 8 JS(p(t), p(t + dt)). For plain
numbers it is the mean squared difference. A chain of pivots is trained to the least energy,

    min over θ of E_t [ ds²(φ(t), φ(t + h)) / h² ]        length = Σ_k ds(φ(t_k), φ(t_{k+1}))

No labels are needed, and none are used: the loss stays low as far as short paths do not leave what A and B predict. The
paper measures between neighbouring pivots; here t is drawn from the whole range, so that a path does not bulge between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.connectivity.curves.goals import run
from isomerge.connectivity.curves.problem import CurveProblem, Trained
from isomerge.connectivity.curves.shapes import PolygonalChain, Shape
from isomerge.connectivity.curves.volume import Point
from isomerge.data.base import Batch
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import rows_of, scores_in
from isomerge.running.stock import inputs_of

PARTS = 4
"""Into so many a stretch between two pivots is cut where length is measured."""
LOOKS = 4
"""Batches it is measured on."""


def geodesic(problem: CurveProblem) -> Trained:
    space, shape = problem.space, PolygonalChain.even(problem.pivots)
    pivots = [space.start([1 - t, t]) for t in shape.knots[1:-1]]
    step = 1 / (2 * (problem.pivots + 1))
    batches = [next(problem.batches) for _ in range(LOOKS)]
    straight = length(problem, PolygonalChain.even(0), [], batches, PARTS * (problem.pivots + 1))

    def energy(batch: Batch) -> Tensor:
        t = problem.uniform() * (1 - step)
        return between(problem, shape, pivots, batch, t, t + step) / step**2

    problem.descend(pivots, energy, problem.steps)
    own = length(problem, shape, pivots, batches, PARTS * (problem.pivots + 1))
    space.keep(pivots)
    return Trained(shape, {"length": own, "straight_length": straight})


@torch.no_grad()
def length(problem: CurveProblem, shape: Shape, pivots: Sequence[Point], batches: Sequence[Batch], parts: int) -> float:
    """Σ ds over even parts, each ds² the mean over the batches."""
    total = 0.0
    for k in range(parts):
        ends = k / parts, (k + 1) / parts
        squares = [float(between(problem, shape, pivots, batch, *ends)) for batch in batches]
        total += max(0.0, sum(squares) / len(squares)) ** 0.5
    return total


def between(problem: CurveProblem, shape: Shape, pivots: Sequence[Point], batch: Batch, t: float, u: float) -> Tensor:
    """ds² between two points of the path, on one batch."""
    space, module = problem.space, problem.space.mixture.module
    inputs = inputs_of(batch, module)
    vertices = [*space.vertices, *pivots]
    first, second = (scores_in(run(module, space.mix(shape.shares(x), vertices), inputs)) for x in (t, u))
    parts, padding = [], PaddingMask(inputs, module)
    for field, scores in first.items():
        valid = padding.of_side(scores[..., 0].numel(), encoder=False)
        parts.append(squared_distance(module, field, rows_of(scores, valid), rows_of(second[field], valid)))
    return torch.stack(parts).sum()


def squared_distance(module: object, field: str, one: Tensor, other: Tensor) -> Tensor:
    """Of rows of scores: 8 times the Jensen–Shannon divergence of classes, or of each label that may hold; the squared
    difference of plain numbers."""
    task = getattr(getattr(module, "config", None), "problem_type", None)
    if field == "hidden" or task == "regression" or one.shape[-1] == 1:
        return F.mse_loss(one, other)
    if task == "multi_label_classification":
        one, other = (torch.stack([x, -x], -1) / 2 for x in (one, other))  # softmax of these two is the sigmoid
    logs = [x.log_softmax(-1) for x in (one, other)]
    mean = torch.stack(logs).logsumexp(0) - math.log(2)
    divergences = [(x.exp() * (x - mean)).sum(-1) for x in logs]
    return 4 * (divergences[0] + divergences[1]).mean()
