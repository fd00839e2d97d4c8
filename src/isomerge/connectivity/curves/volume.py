"""Volumes of simplexes in any number of dimensions, and of complexes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Point = dict[str, Tensor]


def log_volume(points: Sequence[Point]) -> Tensor:
    """log V of the simplex with these corners: V = √det G / n!, G_ij = ⟨p_i − p_0, p_j − p_0⟩.

    >>> square = [{"w": torch.tensor(p, dtype=torch.float64)} for p in ([0.0, 0], [2.0, 0], [0.0, 3.0])]
    >>> round(float(log_volume(square).exp()), 6)
    3.0
    """
    edges = [{name: p[name] - points[0][name] for name in p} for p in points[1:]]
    rows = [torch.stack([inner(a, b) for b in edges]) for a in edges]
    log_determinant: Tensor = torch.linalg.slogdet(torch.stack(rows))[1]
    return log_determinant / 2 - math.lgamma(len(edges) + 1)


def complex_log_volume(simplexes: Sequence[Sequence[Point]]) -> Tensor:
    """log of the sum of the volumes of simplexes of one dimension."""
    return torch.logsumexp(torch.stack([log_volume(simplex) for simplex in simplexes]), 0)


def inner(a: Point, b: Point) -> Tensor:
    """⟨a, b⟩ in float64: a determinant takes the differences of such sums."""
    return torch.stack([(a[name].double() * b[name].double()).sum() for name in a]).sum()
