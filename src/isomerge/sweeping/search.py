"""Look for the lowest value of a function between bounds in so many evaluations.

The merged model's loss is cheap to bracket and has no gradient here, and may have several valleys: half of the
evaluations look everywhere, the other half go down from the best place found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from isomerge.errors import RequestError
from isomerge.merging.recipe import Recipe
from isomerge.sweeping.measuring import Bench
from isomerge.sweeping.points import Values, describe_values, points_of
from isomerge.sweeping.ranges import Axis
from isomerge.sweeping.result import SweepPoint

Score = Callable[[tuple[float, ...]], float]
GOLDEN = (3 - math.sqrt(5)) / 2
CLOSE = 1e-4  # of the range: two values nearer than this are one


class EvaluationsUsed(Exception):
    """All evaluations are used."""


def search(score: Score, axes: Sequence[Axis], evaluations: int, seed: int = 0) -> None:
    """Call `score` at most so many times, with values between the bounds; the caller remembers what it saw."""
    seen: dict[tuple[float, ...], float] = {}

    def at(values: Sequence[float]) -> float:
        point = tuple(_tidy(axis, value) for axis, value in zip(axes, values, strict=True))
        if point not in seen:
            if len(seen) >= evaluations:
                raise EvaluationsUsed
            value = score(point)
            seen[point] = value if math.isfinite(value) else math.inf
        return seen[point]

    try:
        if len(axes) == 1:
            _along_one(at, axes[0], evaluations)
        else:
            _among_several(at, axes, evaluations, seed, seen)
    except EvaluationsUsed:
        pass


def _tidy(axis: Axis, value: float) -> float:
    """Inside the bounds, and with no more digits than a recipe should have."""
    assert axis.bounds is not None
    low, high = axis.bounds
    inside = min(max(value, low), high)
    if axis.whole:
        return round(inside)
    return min(max(float(f"{inside:.6g}"), low), high)


def _along_one(at: Callable[[Sequence[float]], float], axis: Axis, evaluations: int) -> None:
    """Evenly spaced points with both ends, then golden sections around the lowest."""
    assert axis.bounds is not None
    low, high = axis.bounds
    count = min(evaluations, max(3, (evaluations + 1) // 2))
    places = [low + (high - low) * n / (count - 1) for n in range(count)] if count > 1 else [(low + high) / 2]
    values = [at([place]) for place in places]
    best = values.index(min(values))
    left, middle, right = places[max(0, best - 1)], places[best], places[min(count - 1, best + 1)]
    lowest = values[best]
    while right - left > CLOSE * (high - low):
        # The wider side is cut; at an end of the range there is only one.
        upper = right - middle >= middle - left
        new = middle + GOLDEN * (right - middle) if upper else middle - GOLDEN * (middle - left)
        value = at([new])
        if value < lowest:
            left, right = (middle, right) if upper else (left, middle)
            middle, lowest = new, value
        else:
            left, right = (left, new) if upper else (new, right)


def _among_several(
    at: Callable[[Sequence[float]], float],
    axes: Sequence[Axis],
    evaluations: int,
    seed: int,
    seen: dict[tuple[float, ...], float],
) -> None:
    """Halton's points, shifted by the seed, then the simplex of Nelder and Mead from the best."""
    from scipy.optimize import minimize  # slow to import, and one parameter does not need it
    from scipy.stats import qmc

    bounds = [axis.bounds for axis in axes if axis.bounds is not None]
    low, high = (np.array(side, dtype=float) for side in zip(*bounds, strict=True))
    shift = np.random.default_rng(seed).random(len(axes))
    everywhere = (qmc.Halton(len(axes), scramble=False).random(max(1, evaluations // 2)) + shift) % 1
    for place in everywhere:
        at((low + place * (high - low)).tolist())
    while True:  # a simplex may shrink before all evaluations are used; a new one starts from the best, smaller
        best = np.array(min(seen, key=lambda point: seen[point]), dtype=float)
        before = len(seen)
        side = 0.2 * (high - low)
        corners = [best]
        for axis in range(len(axes)):
            corner = best.copy()
            corner[axis] += side[axis] if best[axis] + side[axis] <= high[axis] else -side[axis]
            corners.append(corner)
        minimize(
            lambda values: at(values.tolist()), best, method="Nelder-Mead", bounds=list(zip(low, high, strict=True)),
            options={"initial_simplex": np.array(corners), "xatol": CLOSE, "fatol": 0.0, "maxiter": 50 * len(axes)},
        )  # fmt: skip
        if len(seen) == before:
            return


def corners(axes: Sequence[Axis]) -> list[Values]:
    """All parameters at their lower and at their upper bound: if these are refused, so is the search."""
    return [{axis.name: axis.bounds[side] for axis in axes if axis.bounds is not None} for side in (0, 1)]


def typed(recipe: Recipe, axes: Sequence[Axis]) -> list[Axis]:
    """Axes that know whether their parameter takes whole numbers only: the recipe is asked."""

    def takes(values: Values) -> bool:
        try:
            points_of(recipe, [values])
        except RequestError:
            return False
        return True

    low = corners(axes)[0]
    between = {
        axis.name: axis.bounds[0] + (axis.bounds[1] - axis.bounds[0]) / 2.0001
        for axis in axes
        if axis.bounds is not None
    }
    return [replace(axis, whole=not takes({**low, axis.name: between[axis.name]})) for axis in axes]


def searched(bench: Bench, recipe: Recipe, axes: Sequence[Axis], evaluations: int, seed: int) -> list[SweepPoint]:
    """Every point that was measured. Values that do not go together are the worst, and end nothing."""
    measured: list[SweepPoint] = []
    refused: list[str] = []

    def score(values: tuple[float, ...]) -> float:
        given: Values = dict(zip((axis.name for axis in axes), values, strict=True))
        try:
            (point,) = points_of(recipe, [given])
            bench.merger.require(point.recipe)
        except RequestError as error:
            refused.append(f"{describe_values(given)}: {error}")
            return math.inf
        measured.append(bench.measured(point))
        return bench.judge.score(measured[-1])

    search(score, axes, evaluations, seed)
    if refused:
        count = f"{len(refused)} of the points tried" if len(refused) > 1 else "one of the points tried"
        bench.notes.append(f"{count} cannot be merged; the first is {refused[0]}")
    return measured
