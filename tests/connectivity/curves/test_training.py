"""Trained paths against scipy's optima and finite differences, on losses of a few parameters in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from torch import nn

from connectivity.curves.landscapes import Place, problem_on, ring
from isomerge.connectivity.curves.bezier import bezier
from isomerge.connectivity.curves.chain import chain
from isomerge.connectivity.curves.shapes import BezierCurve
from isomerge.connectivity.curves.simplex import FLAT, simplex
from isomerge.connectivity.curves.subspace import squared_cosine, subspace
from isomerge.errors import RequestError

A, B = np.array([-1.0, 0.0]), np.array([0.0, 1.0])


def expected(place: np.ndarray, path: str) -> float:
    """E_t (|φ(t)|² − 1)² by quadrature."""

    def loss(t: float) -> float:
        if path == "bezier":
            point = (1 - t) ** 2 * A + 2 * t * (1 - t) * place + t**2 * B
        else:
            point = A + 2 * t * (place - A) if t < 0.5 else place + (2 * t - 1) * (B - place)
        return float((point @ point - 1) ** 2)

    return float(quad(loss, 0, 1, points=[0.5])[0])


@pytest.mark.parametrize(("name", "train"), [("bezier", bezier), ("chain", chain)])
def test_the_expected_loss_becomes_what_scipy_finds(name: str, train: object) -> None:
    problem = problem_on(ring, Place(*A), Place(*B), steps=600)
    assert callable(train)
    trained = train(problem)
    found = problem.space.vertices[2]["w"].numpy()
    best = minimize(expected, (A + B) / 2, args=(name,), tol=1e-10)
    assert expected(found, name) < best.fun + 2e-3 < expected((A + B) / 2, name) / 5
    assert np.allclose(found, best.x, atol=0.06) and trained.shape.vertices == 3


def test_gradients_of_the_expected_loss_are_finite_differences() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    problem = problem_on(lambda m: (m(x) - y).square().mean(), net(1), net(2))
    space, shape, places = problem.space, BezierCurve(3), (0.1, 0.5, 0.8)
    pivot = space.start([0.5, 0.5])
    for tensor in space.parameters([pivot]):
        tensor.requires_grad_(True)
    torch.stack([problem.loss(shape.shares(t), [pivot], {}, (1 - t, t)) for t in places]).mean().backward()

    def mean_loss(flat: torch.Tensor) -> float:
        ends = [torch.nn.utils.parameters_to_vector(net(seed).parameters()).detach() for seed in (1, 2)]
        model, total = net(1), 0.0
        for t in places:
            point = (1 - t) ** 2 * ends[0] + 2 * t * (1 - t) * flat + t**2 * ends[1]
            torch.nn.utils.vector_to_parameters(point, model.parameters())
            total += float((model(x) - y).square().mean().detach())
        return total / len(places)

    start = torch.cat([tensor.detach().flatten() for tensor in pivot.values()])
    got = torch.cat([tensor.grad.flatten() for tensor in pivot.values() if tensor.grad is not None])
    for k in range(0, len(start), 3):
        move = torch.zeros_like(start)
        move[k] = 1e-6
        slope = (mean_loss(start + move) - mean_loss(start - move)) / 2e-6
        assert float(got[k]) == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_the_same_seed_trains_the_same_path() -> None:
    found = []
    for seed in (0, 0, 1):
        problem = problem_on(ring, Place(*A), Place(*B), steps=20, seed=seed)
        bezier(problem)
        found.append(problem.space.vertices[2]["w"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def bowl(model: Place) -> torch.Tensor:
    return model.w.square().sum()


def test_a_simplex_grows_by_vertices_whose_height_is_that_above_the_face() -> None:
    problem = problem_on(ring, Place(-1.0, 0, 0), Place(0.0, 1, 0), steps=200, pivots=2, spread=0.05)
    trained = simplex(problem)
    a, b, first, second = (vertex["w"].numpy() for vertex in problem.space.vertices)
    apart = np.linalg.norm(a - b)
    edge = first - a
    foot = second - a - ((second - a) @ edge) / (edge @ edge) * edge
    heights = [np.linalg.norm(first - a) / apart, np.linalg.norm(foot) / apart]
    assert trained.details["heights"] == pytest.approx(heights, rel=1e-8)

    def area(one: np.ndarray) -> float:
        return float(np.linalg.norm(np.cross(first - one, second - one))) / 2

    volumes = [(np.linalg.norm(first - a) + np.linalg.norm(first - b)) / apart, (area(a) + area(b)) / apart**2]
    assert trained.details["log_volumes"] == pytest.approx(np.log(volumes), rel=1e-8)


def test_more_spread_gives_more_volume() -> None:
    volumes = []
    for spread in (0.001, 0.3):
        problem = problem_on(bowl, Place(-1.0, 0, 0), Place(0.0, 1, 0), steps=200, pivots=1, spread=spread)
        volumes.append(simplex(problem).details["log_volumes"][-1])
    assert volumes[1] > volumes[0] + 0.02


def test_a_vertex_without_a_direction_of_its_own_ends_the_growth() -> None:
    problem = problem_on(bowl, Place(-1.0, 0), Place(2.0, 1), steps=40, pivots=4, spread=0.01)
    details = simplex(problem).details  # a plane has room for triangles
    assert details["vertices"] == 4 and len(details["heights"]) == 3
    assert details["heights"][1] > FLAT > 1e-6 > details["heights"][2]


def test_the_corners_of_a_subspace_learn_together() -> None:
    problem = problem_on(ring, Place(*A), Place(*B), steps=400, pivots=0, spread=0.0, rate=0.02)
    trained = subspace(problem)
    ends = [vertex["w"].numpy() for vertex in problem.space.vertices[2:]]

    def mean_loss(flat: np.ndarray) -> float:
        one, other = flat.reshape(2, 2)
        return float(quad(lambda t: (float(np.sum(((1 - t) * one + t * other) ** 2)) - 1) ** 2, 0, 1)[0])

    assert mean_loss(np.concatenate(ends)) < mean_loss(np.concatenate([A, B])) / 2
    assert trained.shape.shares(0.5) == [0.0, 0.0, 0.5, 0.5]
    cosine = ends[0] @ ends[1] / np.linalg.norm(ends[0]) / np.linalg.norm(ends[1])
    assert trained.details["cosines"] == pytest.approx([abs(cosine)])
    found = squared_cosine(problem.space.vertices[2], problem.space.vertices[3], problem.space)
    assert float(found) == pytest.approx(cosine**2)


def test_the_squared_cosine_pushes_corners_apart() -> None:
    cosines = []
    for spread in (0.0, 5.0):
        problem = problem_on(
            lambda m: 0 * m.w.sum(), Place(1.0, 0), Place(0.8, 0.6), steps=100, pivots=0, spread=spread
        )
        cosines.append(subspace(problem).details["cosines"][0])
    assert cosines[0] == pytest.approx(0.8, abs=1e-6) and cosines[1] < 0.1


@pytest.mark.parametrize("loss", [lambda m: 1.0, lambda m: m.w.detach().sum(), lambda m: m.w * 2])
def test_a_loss_without_a_gradient_is_refused(loss: object) -> None:
    assert callable(loss)
    with pytest.raises(RequestError, match="one number as a tensor with a gradient"):
        bezier(problem_on(loss, Place(*A), Place(*B)))
