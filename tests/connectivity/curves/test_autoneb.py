"""AutoNEB: where pivots are inserted, which way they may go, and the path that comes out on a known landscape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from connectivity.curves.landscapes import Place, problem_on, ring
from isomerge.connectivity.curves.autoneb import THRESHOLD, across, autoneb, highest_places, knots


@pytest.mark.parametrize("seed", range(6))
def test_pivots_are_inserted_at_the_highest_place_of_a_part_that_rises(seed: int) -> None:
    losses = np.random.default_rng(seed).exponential(size=13)
    expected = []
    for start in (0, 4, 8):
        straight = np.interp(np.arange(1, 4), [0, 4], [losses[start], losses[start + 4]])
        rises = losses[start + 1 : start + 4] - straight
        if rises.max() > THRESHOLD * (losses.max() - losses.min()):
            expected.append(start + 1 + int(rises.argmax()))
    assert highest_places(losses.tolist(), between=3) == expected


def test_nothing_is_inserted_into_a_path_without_rises() -> None:
    assert highest_places([1.0, 0.8, 0.6, 0.4, 0.2, 0.4, 0.6, 0.8, 1.0], between=3) == []


def test_a_gradient_has_nothing_along_the_tangent() -> None:
    torch.manual_seed(0)
    point = {name: torch.randn(3, dtype=torch.float64, requires_grad=True) for name in "ab"}
    tangent = {name: torch.randn(3, dtype=torch.float64) for name in "ab"}
    flat = across(point, tangent, ["a", "b"])
    assert all(torch.equal(flat[name], point[name]) for name in "ab")
    (flat["a"].pow(3).sum() + (flat["b"] * flat["a"]).sum()).backward()
    p, q, direction = (np.concatenate([t[n].detach().numpy() for n in "ab"]) for t in (point, point, tangent))
    slope = np.concatenate([3 * p[:3] ** 2 + q[3:], p[:3]])
    unit = direction / np.linalg.norm(direction)
    grads = [point[name].grad for name in "ab"]
    got = np.concatenate([g.numpy() for g in grads if g is not None])
    assert np.allclose(got, slope - (slope @ unit) * unit, atol=1e-12)


def test_knots_lie_at_their_distance_along_the_chain() -> None:
    places = [np.array(p) for p in ((0.0, 0), (3.0, 4), (3.0, 5), (5.0, 5))]
    parts = [np.linalg.norm(b - a) for a, b in itertools.pairwise(places)]
    expected = np.concatenate([[0], np.cumsum(parts) / sum(parts)])
    assert knots([{"w": torch.tensor(p)} for p in places]) == pytest.approx(expected.tolist())


def test_the_band_comes_to_lie_in_the_valley() -> None:
    a, b = np.array([-1.0, 0.0]), np.array([np.cos(0.3), np.sin(0.3)])
    problem = problem_on(ring, Place(*a), Place(*b), steps=300, rate=0.2, pivots=2)
    trained = autoneb(problem)
    cycles = trained.details["cycles"]
    for before, after in itertools.pairwise(cycles):
        assert after["pivots"] == before["pivots"] + len(before["inserted_at"])
    assert cycles[-1]["pivots"] > 2 and cycles[-1]["inserted_at"] == []
    places = np.stack([vertex["w"].numpy() for vertex in problem.space.vertices])

    def loss(t: float) -> float:
        point = np.asarray(trained.shape.shares(t)) @ places
        return float((point @ point - 1) ** 2)

    straight = max(float(np.sum(((1 - t) * a + t * b) ** 2) - 1) ** 2 for t in np.linspace(0, 1, 101))
    assert max(map(loss, np.linspace(0, 1, 101))) < 0.01 * straight
    steps = np.linalg.norm(np.diff(np.stack([a, *places[2:], b]), axis=0), axis=1)
    assert steps.max() < 1.02 * steps.min(), "pivots stand at even distances"
