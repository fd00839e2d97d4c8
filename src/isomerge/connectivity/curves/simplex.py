"""SPRO: simplexes of low loss with a large volume (Benton et al. 2021, arXiv 2102.13042).

    K = S(A, θ_1, …, θ_n) ∪ S(B, θ_1, …, θ_n)        min over θ_n of E_{φ ~ K} L(φ) − λ log V(K)

Vertices are added one after the other; those before stay. A new one is kept while it gives the simplexes a new
direction: while it stands at least a hundredth of the distance of A and B above the face of the others. Lengths are in
units of that distance, so log V is a pure number. A point is drawn from one of the two simplexes, evenly within it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isomerge.connectivity.curves.problem import CurveProblem, Trained
from isomerge.connectivity.curves.shapes import SimplicialComplex
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.connectivity.curves.volume import Point, complex_log_volume, log_volume
from isomerge.data.base import Batch

NOISE = 0.1
"""A vertex starts at the mean of the others plus this; inside their plane the volume would have no gradient."""
FLAT = 0.01


def simplex(problem: CurveProblem) -> Trained:
    space = problem.space
    log_volumes, heights = [], []
    for number in range(problem.pivots):
        count = len(space.vertices)
        vertex = space.start([1 / count] * count, NOISE, problem.draw)
        steps = problem.steps * (number + 1) // problem.pivots - problem.steps * number // problem.pivots
        problem.descend([vertex], AddedVertex(problem, vertex).loss, steps)
        with torch.no_grad():
            log_volumes.append(relative_log_volume(space, [*space.vertices, vertex]))
            heights.append(height_above(space, vertex))
        if heights[-1] < FLAT:
            break
        space.keep([vertex])
    details = {"log_volumes": log_volumes, "heights": heights, "vertices": len(space.vertices)}
    return Trained(complex_of(len(space.vertices)), details)


class AddedVertex:
    """The loss of a vertex beside those that stay."""

    def __init__(self, problem: CurveProblem, vertex: Point) -> None:
        self._problem, self._vertex = problem, vertex
        self._complex = complex_of(len(problem.space.vertices) + 1)

    def loss(self, batch: Batch) -> Tensor:
        problem, space = self._problem, self._problem.space
        shares = self._complex.sample(problem.draw)
        to_b = shares[1] + (1 - shares[0] - shares[1]) / 2
        value = problem.loss(shares, [self._vertex], batch, (1 - to_b, to_b))
        if problem.spread == 0:  # the gradient of a flat simplex's volume is not a number, nor is zero times it
            return value
        volume = complex_log_volume(_corners(space, [*space.vertices, self._vertex]))
        return value - problem.spread * volume.to(value)


def complex_of(vertices: int) -> SimplicialComplex:
    """A with all that learned, and B with the same."""
    shared = tuple(range(2, vertices))
    return SimplicialComplex(vertices, ((0, *shared), (1, *shared)), (0, 1))


def relative_log_volume(space: WeightSpace, vertices: list[Point]) -> float:
    """log V(K), with the distance of A and B as the unit of length."""
    dimensions = len(vertices) - 2
    return float(complex_log_volume(_corners(space, vertices))) - dimensions * math.log(space.size())


def height_above(space: WeightSpace, vertex: Point) -> float:
    """How far a new vertex stands above the face of A and those that learned before, over the distance of A and B."""
    face = [space.vertices[0], *space.vertices[2:]]
    corners = [{name: p[name] for name in space.learned} for p in (*face, vertex)]
    whole = float(log_volume(corners)) + math.log(len(face))
    below = float(log_volume(corners[:-1])) if len(face) > 1 else 0.0
    return math.exp(whole - below) / space.size()


def _corners(space: WeightSpace, vertices: list[Point]) -> list[list[Point]]:
    named = [{name: p[name] for name in space.learned} for p in vertices]
    return [[named[k] for k in simplex] for simplex in complex_of(len(vertices)).simplexes]
