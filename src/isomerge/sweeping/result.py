"""What a sweep gives back, and the files it leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from isomerge.evaluation.example_scores import ExampleScores
from isomerge.merging.recipe import Recipe
from isomerge.results import Result
from isomerge.sweeping.points import Values, describe_values, weights_of


@dataclass
class SweepPoint(Result):
    """Loss and metric at one point."""

    OPTIONAL = ("error", "gain", "gain_error")

    parameters: Values
    """The values that were changed; none for the recipe as it is."""
    loss: float | None
    metric: float | None
    seconds: float
    kept: bool
    """It was measured by an earlier run."""
    parent: str | None
    """The model whose weights these are, so that nothing was merged; None for all others."""
    _recipe: Recipe = field(repr=False)
    _scores: ExampleScores | None = field(default=None, repr=False, compare=False)
    error: float | None = None
    """In a search: the standard error of the number that points are ranked by."""
    gain: float | None = None
    """By how much that is better than for the unchanged recipe, on the same examples."""
    gain_error: float | None = None
    """The standard error of the gain."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with these values."""
        return self._recipe


@dataclass
class Contestant(Result):
    """One model beside the best merge: a parent, the base, or another way of merging."""

    name: str
    role: str
    """model, base or merge"""
    loss: float | None
    metric: float | None
    error: float | None
    """The standard error of the number that points are ranked by."""
    gain: float | None = None
    """By how much the best merge is better, on the same examples; None where that cannot be compared."""
    gain_error: float | None = None
    """The standard error of the gain."""
    _scores: ExampleScores | None = field(default=None, repr=False, compare=False)

    def against(self, best: SweepPoint | Contestant, judge: Judge) -> None:
        """Enter how much better the best merge is."""
        by = judge.used([self])
        pair = None if self._scores is None or best._scores is None else best._scores.gain_over(self._scores, by)
        if pair is not None and math.isfinite(pair[1]):
            self.gain, self.gain_error = pair
        elif math.isfinite(judge.score(self)) and math.isfinite(judge.score(best)):
            same = self._scores is None or best._scores is None or self._scores.aligned(best._scores)
            self.gain = judge.score(self) - judge.score(best) if same else None


@dataclass
class SweepTest(Result):
    """The recipe as it is and the best point on other data."""

    OPTIONAL = ("controls", "error")

    data: dict[str, Any]
    """Name, sha256, size and kind."""
    start: dict[str, float | None]
    """Loss and metric of the recipe as it is."""
    best: dict[str, float | None]
    """Loss and metric of the best point."""
    examples: int | None
    error: float | None = None
    """In a search: the standard error of the best point's number."""
    controls: list[Contestant] | None = None
    """In a search: every parent and the base on the same data."""


@dataclass
class TriedRecipe(Result):
    """One way of merging, at the best values that were found for it."""

    name: str
    method: str
    parameters: Values
    loss: float | None
    metric: float | None
    error: float | None
    gain: float | None
    """By how much the best of all is better."""
    gain_error: float | None
    evaluations: int
    seconds: float


@dataclass
class Sweep(Result):
    """All points in their order, and the best of them."""

    OPTIONAL = (
        "start", "test", "plot", "out", "best_recipe", "algorithm", "candidates", "controls", "says", "keep", "model",
    )  # fmt: skip

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
    algorithm: str | None = None
    """Of `isomerge.search` and `isomerge.best`: bayesian, cma or random."""
    candidates: list[TriedRecipe] | None = None
    """Of `isomerge.best`: every way of merging that was tried."""
    controls: list[Contestant] | None = None
    """Every parent and the base on the data of the search."""
    says: str | None = None
    """What came out, in one sentence."""
    keep: str | None = None
    """The parent or base that is at least as good as the best merge; null where the merge is better."""
    model: str | None = None
    """The folder of the written model."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the best point, for `isomerge.merge_recipe([sweep.recipe])`."""
        return self.best.recipe

    @property
    def record(self) -> dict[str, Any]:
        """The same as `to_dict()`."""
        return self.to_dict()


class Scored(Protocol):
    """Whatever has a loss and a metric."""

    @property
    def loss(self) -> float | None: ...

    @property
    def metric(self) -> float | None: ...


Rated = TypeVar("Rated", bound=Scored)


@dataclass(frozen=True)
class Judge:
    """Which of two points is better: by the loss, or by the metric where that is asked for or all there is."""

    by: str | None
    higher_is_better: bool
    l1: float = 0.0
    """What the sum of the sizes of a recipe's weights counts beside the loss (LoRAHub, arXiv 2307.13269)."""

    def used(self, points: Sequence[Scored]) -> str:
        return self.by or ("loss" if any(point.loss is not None for point in points) else "metric")

    def score(self, point: Scored) -> float:
        """Lower is better; what is no number is worst."""
        name = self.used([point])
        value = point.loss if name == "loss" else point.metric
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if name == "metric" and self.higher_is_better else value

    def rank(self, point: Scored) -> float:
        """The score with the penalty on the weights of its recipe, which is what a search makes low."""
        score = self.score(point)
        if self.l1 and isinstance(point, SweepPoint) and self.used([point]) == "loss":
            score += self.l1 * sum(weights_of(point.recipe))
        return score

    def best(self, points: Sequence[Rated]) -> Rated:
        """The first of the lowest."""
        return min(points, key=self.rank)

    def value(self, point: Scored) -> float:
        """The number that points are ranked by."""
        value = point.loss if self.used([point]) == "loss" else point.metric
        return math.nan if value is None else value

    def error(self, point: SweepPoint | Contestant) -> float | None:
        """Its standard error; None where it is not known."""
        error = None if point._scores is None else point._scores.error(self.used([point]))
        return None if error is None or math.isnan(error) else error

    def compare(self, point: SweepPoint, start: SweepPoint) -> None:
        """Enter how sure the number of a point is, and how much better it is than the start."""
        point.error = self.error(point)
        if point._scores is not None and start._scores is not None:
            pair = point._scores.gain_over(start._scores, self.used([point]))
            if pair is not None and math.isfinite(pair[1]):
                point.gain, point.gain_error = pair


def about_parent(best: SweepPoint) -> list[str]:
    """A note where the best point is no merge."""
    if best.parent is None:
        return []
    where = describe_values(best.parameters)
    return [
        f"the best point is one of the parents: {where} gives {best.parent} itself, so no merge in this sweep is "
        "better than that model"
    ]


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
