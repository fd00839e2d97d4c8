"""A line or simplex whose corners learn together, A and B among them (Wortsman et al. 2021, arXiv 2102.10472).

    min over ω_1 … ω_m of E_{α ~ Dirichlet(1)} L(Σ α_k ω_k) + β cos²(ω_j, ω_k),   j ≠ k drawn at every step

The ends are no longer the two models, only where they started; further corners start at A and B in turn, with noise.
The paper trains from random weights, this from trained ones. Points near the middle are what it is for: one model of
the usual size, better than a corner, or several to average the predictions of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.connectivity.curves.problem import CurveProblem, Trained
from isomerge.connectivity.curves.shapes import SimplicialComplex
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.connectivity.curves.volume import Point, inner
from isomerge.data.base import Batch

NOISE = 0.1


def subspace(problem: CurveProblem) -> Trained:
    space, count = problem.space, 2 + problem.pivots
    corners = [
        space.start([float(k % 2 == 0), float(k % 2)], 0.0 if k < 2 else NOISE, problem.draw) for k in range(count)
    ]
    shape = SimplicialComplex(2 + count, (tuple(range(2, 2 + count)),), (2, 3))

    def loss(batch: Batch) -> Tensor:
        value = problem.loss(shape.sample(problem.draw), corners, batch, (0.5, 0.5))
        first, second = torch.randperm(count, generator=problem.draw)[:2].tolist()
        return value + problem.spread * squared_cosine(corners[first], corners[second], space).to(value)

    problem.descend(corners, loss, problem.steps)
    with torch.no_grad():
        cosines = [float(squared_cosine(corners[j], corners[k], space)) ** 0.5 for j in range(count) for k in range(j)]
    space.keep(corners)
    return Trained(shape, {"vertices": count, "cosines": cosines})


def squared_cosine(one: Point, other: Point, space: WeightSpace) -> Tensor:
    a, b = ({name: p[name] for name in space.learned} for p in (one, other))
    return inner(a, b) ** 2 / (inner(a, a) * inner(b, b))
