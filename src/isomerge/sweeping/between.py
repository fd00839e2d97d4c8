"""A search between bounds: which values the recipe takes there, and the points that were tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from isomerge.errors import RequestError
from isomerge.merging.recipe import Recipe
from isomerge.sweeping.bench import Bench
from isomerge.sweeping.points import Values, points_of, said
from isomerge.sweeping.ranges import Axis
from isomerge.sweeping.result import Measured
from isomerge.sweeping.search import search


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


def searched(bench: Bench, recipe: Recipe, axes: Sequence[Axis], evaluations: int, seed: int) -> list[Measured]:
    """Every point that was measured. Values that do not go together are the worst, and end nothing."""
    found: list[Measured] = []
    refused: list[str] = []

    def score(values: tuple[float, ...]) -> float:
        given: Values = dict(zip((axis.name for axis in axes), values, strict=True))
        try:
            (point,) = points_of(recipe, [given])
            bench.merger.require(point.recipe)
        except RequestError as error:
            refused.append(f"{said(given)}: {error}")
            return math.inf
        found.append(bench.measure(point))
        return bench.judge.score(found[-1])

    search(score, axes, evaluations, seed)
    if refused:
        count = f"{len(refused)} of the points tried" if len(refused) > 1 else "one of the points tried"
        bench.notes.append(f"{count} cannot be merged; the first is {refused[0]}")
    return found
