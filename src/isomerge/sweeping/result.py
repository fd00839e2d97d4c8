"""What a sweep gives back, and the files it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomerge.merging.recipe import Recipe
from isomerge.reporting.record import record_text, write_text
from isomerge.sweeping.points import Values, said


@dataclass(frozen=True)
class Measured:
    """Loss and metric at one point."""

    parameters: Values
    """The values that were changed; none for the recipe as it is."""
    loss: float | None
    metric: float | None
    seconds: float
    recipe: Recipe = field(repr=False)
    kept: bool = False
    """It was measured by an earlier run."""

    def record(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("parameters", "loss", "metric", "seconds", "kept")}


@dataclass(frozen=True)
class Sweep:
    """All points in their order, the best of them, and the JSON record."""

    points: list[Measured]
    best: Measured
    record: dict[str, Any] = field(repr=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the best point, for `isomerge.merge_recipe([sweep.recipe])`."""
        return self.best.recipe


@dataclass(frozen=True)
class Judge:
    """Which of two points is better: by the loss, or by the metric where that is asked for or all there is."""

    by: str | None
    higher_is_better: bool

    def used(self, points: list[Measured]) -> str:
        return self.by or ("loss" if any(point.loss is not None for point in points) else "metric")

    def score(self, point: Measured) -> float:
        """Lower is better; what is no number is worst."""
        name = self.used([point])
        value = point.loss if name == "loss" else point.metric
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if name == "metric" and self.higher_is_better else value

    def best(self, points: list[Measured]) -> Measured:
        """The first of the lowest."""
        return min(points, key=self.score)


def remarks(points: list[Measured], hint: str = "") -> list[str]:
    """What a reader of the numbers should know; `hint` says what else could be varied."""
    notes = []
    broken = [said(point.parameters) for point in points if not _finite(point)]
    if broken:
        notes.append(f"the model computes no number at {'; '.join(broken[:5])}{' …' if len(broken) > 5 else ''}")
    numbers = {(point.loss, point.metric) for point in points}
    if len(points) > 2 and len(numbers) == 1 and not broken:
        more = f". {hint}" if hint else ""
        notes.append(f"all points are equal: what is swept changes nothing in this merge{more}")
    return notes


def _finite(point: Measured) -> bool:
    value = point.metric if point.loss is None else point.loss
    return value is not None and math.isfinite(value)


def write(sweep: Sweep, out: Path) -> list[str]:
    """The record, and the best point as a recipe; the names of the files."""
    write_text(out / "sweep.json", record_text(sweep.record))
    write_text(out / "best.yml", sweep.recipe.to_yaml())
    return ["sweep.json", "best.yml"]
