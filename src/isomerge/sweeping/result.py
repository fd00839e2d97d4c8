"""What a sweep gives back, and the files it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from isomerge.merging.recipe import Recipe
from isomerge.results import Result
from isomerge.sweeping.points import Values, describe_values


@dataclass
class SweepPoint(Result):
    """Loss and metric at one point."""

    parameters: Values
    """The values that were changed; none for the recipe as it is."""
    loss: float | None
    metric: float | None
    seconds: float
    kept: bool
    """It was measured by an earlier run."""
    _recipe: Recipe = field(repr=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe with these values."""
        return self._recipe


@dataclass
class SweepTest(Result):
    """The recipe as it is and the best point on other data."""

    data: dict[str, Any]
    """Name, sha256, size and kind."""
    start: dict[str, float | None]
    """Loss and metric of the recipe as it is."""
    best: dict[str, float | None]
    """Loss and metric of the best point."""
    examples: int | None


@dataclass
class Sweep(Result):
    """All points in their order, and the best of them."""

    OPTIONAL = ("start", "test", "plot", "out", "best_recipe")

    models: list[str]
    method: str
    mode: str
    """grid, together or search"""
    parameters: list[dict[str, Any]]
    """Each with `name`, and `values` or `bounds`."""
    task: str
    data: dict[str, Any] | None
    """Name, sha256, size and kind."""
    metric_name: str | None
    higher_is_better: bool | None
    examples: int | None
    by: str
    """What the best point is best in: loss or metric."""
    points: list[SweepPoint] = field(repr=False)
    best: SweepPoint
    kept: int
    """How many points were measured by an earlier run."""
    notes: list[str]
    seconds: float
    start: SweepPoint | None = None
    """The recipe as it is, where a search began."""
    test: SweepTest | None = None
    plot: str | None = None
    out: str | None = None
    best_recipe: str | None = None

    @property
    def recipe(self) -> Recipe:
        """The recipe of the best point, for `isomerge.merge_recipe([sweep.recipe])`."""
        return self.best.recipe

    @property
    def record(self) -> dict[str, Any]:
        """The same as `to_dict()`."""
        return self.to_dict()


@dataclass(frozen=True)
class Judge:
    """Which of two points is better: by the loss, or by the metric where that is asked for or all there is."""

    by: str | None
    higher_is_better: bool

    def used(self, points: list[SweepPoint]) -> str:
        return self.by or ("loss" if any(point.loss is not None for point in points) else "metric")

    def score(self, point: SweepPoint) -> float:
        """Lower is better; what is no number is worst."""
        name = self.used([point])
        value = point.loss if name == "loss" else point.metric
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if name == "metric" and self.higher_is_better else value

    def best(self, points: list[SweepPoint]) -> SweepPoint:
        """The first of the lowest."""
        return min(points, key=self.score)


def remarks(points: list[SweepPoint], hint: str = "") -> list[str]:
    """What a reader of the numbers should know; `hint` says what else could be varied."""
    notes = []
    broken = [describe_values(point.parameters) for point in points if not _finite(point)]
    if broken:
        notes.append(f"the model computes no number at {'; '.join(broken[:5])}{' …' if len(broken) > 5 else ''}")
    numbers = {(point.loss, point.metric) for point in points}
    if len(points) > 2 and len(numbers) == 1 and not broken:
        more = f". {hint}" if hint else ""
        notes.append(f"all points are equal: what is swept changes nothing in this merge{more}")
    return notes


def _finite(point: SweepPoint) -> bool:
    value = point.metric if point.loss is None else point.loss
    return value is not None and math.isfinite(value)
