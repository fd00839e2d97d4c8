"""Points of curves and simplexes against de Casteljau's algorithm, numpy's interpolation and geometry."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isomerge.connectivity.curves.shapes import BezierCurve, PolygonalChain, Shape, SimplicialComplex
from isomerge.errors import RequestError

PLACES = np.random.default_rng(0).normal(size=(5, 4))  # A, B, then three that learned


def at(shape: Shape, t: float) -> np.ndarray:
    return np.asarray(shape.shares(t)) @ PLACES[: shape.vertices]


def de_casteljau(points: np.ndarray, t: float) -> np.ndarray:
    while len(points) > 1:
        points = (1 - t) * points[:-1] + t * points[1:]
    return points[0]


@pytest.mark.parametrize("vertices", [2, 3, 4, 5])
@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_bezier_points_are_those_of_de_casteljau(vertices: int, t: float) -> None:
    control = np.stack([PLACES[0], *PLACES[2:vertices], PLACES[1]])
    assert np.allclose(at(BezierCurve(vertices), t), de_casteljau(control, t), atol=1e-14)


@pytest.mark.parametrize("knots", [(0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.1, 0.7, 1.0)])
def test_a_chain_is_interpolated_in_every_coordinate(knots: tuple[float, ...]) -> None:
    shape = PolygonalChain(knots)
    along = np.stack([PLACES[0], *PLACES[2 : len(knots)], PLACES[1]])
    for t in np.linspace(0, 1, 23):
        expected = [np.interp(t, knots, column) for column in along.T]
        assert np.allclose(at(shape, float(t)), expected, atol=1e-14)


@pytest.mark.parametrize(
    "shape", [BezierCurve(4), PolygonalChain.even(3), SimplicialComplex(4, ((0, 2, 3), (1, 2, 3)), (0, 1))]
)
def test_the_ends_are_the_models_and_nothing_else(shape: Shape) -> None:
    for t, place in ((0.0, 0), (1.0, 1)):
        assert shape.shares(t) == [float(k == place) for k in range(shape.vertices)]
    for t in (0.1, 0.5, 0.77):
        assert sum(shape.shares(t)) == pytest.approx(1)


def test_a_path_through_simplexes_never_mixes_the_two_models() -> None:
    shape = SimplicialComplex(4, ((0, 2, 3), (1, 2, 3)), (0, 1))
    for t in np.linspace(0, 1, 21):
        first, second, *_ = shape.shares(float(t))
        assert first * second == 0
    assert shape.shares(0.5) == [0.0, 0.0, 0.5, 0.5]


def test_samples_are_spread_evenly_over_a_simplex() -> None:
    shape = SimplicialComplex(5, ((2, 3, 4),), (2, 3))
    draw = torch.Generator().manual_seed(0)
    drawn = np.array([shape.sample(draw) for _ in range(4000)])
    assert np.all(drawn >= 0) and np.allclose(drawn.sum(1), 1) and not drawn[:, :2].any()
    assert np.allclose(drawn.mean(0)[2:], 1 / 3, atol=0.02)
    assert np.allclose(drawn[:, 2].var(), 1 / 18, atol=0.005), "of Dirichlet(1, 1, 1)"


def test_points_by_weights() -> None:
    shape = SimplicialComplex(4, ((0, 2, 3), (1, 2, 3)), (0, 1))
    assert shape.point([0.2, 0, 0.3, 0.5]) == [0.2, 0.0, 0.3, 0.5]
    assert SimplicialComplex(4, ((2, 3),), (2, 3)).point([0.25, 0.75]) == [0.0, 0.0, 0.25, 0.75]
    for wrong, message in {
        (0.5, 0.5): "it has 4 vertices",
        (0.5, 0.5, 0.5, 0.5): "add up to 1",
        (-0.5, 0.5, 0.5, 0.5): "0 or more",
        (0.5, 0.5, 0.0, 0.0): "no simplex has all these vertices",
        (1.5,): "t goes from 0 to 1",
    }.items():
        with pytest.raises(RequestError, match=message):
            shape.point(wrong)
    with pytest.raises(RequestError, match="one coordinate"):
        BezierCurve(3).point([0.5, 0.5])
