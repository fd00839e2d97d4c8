"""Volumes against Cayley–Menger determinants and a convex hull."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial import ConvexHull

from isomerge.connectivity.curves.volume import complex_log_volume, log_volume


def as_point(row: np.ndarray) -> dict[str, torch.Tensor]:
    """Over two tensors, as the weights of a model are."""
    both = torch.tensor(row)
    return {"a": both[:2].reshape(1, 2), "b": both[2:]}


def cayley_menger(points: np.ndarray) -> float:
    """(−1)^(n+1) / (2ⁿ n!²) · det of the bordered matrix of squared distances = V²."""
    n = len(points) - 1
    bordered = np.ones((n + 2, n + 2))
    bordered[0, 0] = 0
    bordered[1:, 1:] = ((points[:, None] - points[None]) ** 2).sum(-1)
    return math.sqrt((-1) ** (n + 1) * np.linalg.det(bordered) / (2**n * math.factorial(n) ** 2))


@pytest.mark.parametrize("corners", [2, 3, 4, 5])
def test_a_volume_is_that_of_cayley_and_menger(corners: int) -> None:
    points = np.random.default_rng(corners).normal(size=(corners, 6))
    assert math.exp(log_volume([as_point(p) for p in points])) == pytest.approx(cayley_menger(points), rel=1e-10)


def test_a_volume_is_that_of_the_convex_hull() -> None:
    points = np.random.default_rng(1).normal(size=(4, 3))
    assert math.exp(log_volume([as_point(p) for p in points])) == pytest.approx(ConvexHull(points).volume, rel=1e-10)


def test_volumes_of_a_complex_add_up() -> None:
    points = np.random.default_rng(2).normal(size=(4, 6))
    parts = [points[[0, 2, 3]], points[[1, 2, 3]]]
    found = complex_log_volume([[as_point(p) for p in part] for part in parts])
    assert math.exp(found) == pytest.approx(sum(map(cayley_menger, parts)), rel=1e-10)
