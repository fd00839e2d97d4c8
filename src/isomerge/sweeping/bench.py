"""Where points are measured, one merged model at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isomerge.connectivity.measures import Numbers
from isomerge.errors import IsomergeError, RequestError
from isomerge.sweeping.kept import Kept
from isomerge.sweeping.measuring import FACTS, Ruler
from isomerge.sweeping.merging import Merger, preparation
from isomerge.sweeping.module import NotFinite, Seat
from isomerge.sweeping.points import Point, said
from isomerge.sweeping.result import Judge, Measured

MEASURING = "measuring"
"""How progress calls the points of a sweep."""


@dataclass
class Bench:
    """Merges a point into the one module and measures it, unless an earlier run has."""

    merger: Merger
    ruler: Ruler
    kept: Kept
    device: str
    by: str | None
    total: int
    progress: Callable[[int, int, str], None] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unmerged: NotFinite | None = None
    """Why the first of the points that have no weights has none."""
    _done: int = 0

    def __post_init__(self) -> None:
        self._seat = Seat(self.device)

    @property
    def judge(self) -> Judge:
        return Judge(self.by, self.facts.get("higher_is_better") is not False)

    def all(self, points: Sequence[Point]) -> list[Measured]:
        """Points that share an alignment one after the other, so that only one is held; given back in their order."""
        groups: dict[str, list[int]] = {}
        for number, point in enumerate(points):
            groups.setdefault(preparation(point.recipe), []).append(number)
        found = {number: self.measure(points[number]) for group in groups.values() for number in group}
        return [found[number] for number in range(len(points))]

    def measure(self, point: Point) -> Measured:
        if self.progress:
            self.progress(self._done, self.total, MEASURING)
        known = self.kept.find(point.recipe)
        if known is None:
            numbers, seconds = self._measured(point)
        else:
            numbers, seconds = {key: known[key] for key in ("loss", "metric")}, known["seconds"]
            self.facts = {key: known[key] for key in FACTS}
        if self.by is not None and numbers[self.by] is None:
            raise RequestError(f"Sweeping by the {self.by}: this task gives none. Leave --by out.")
        self._done += 1
        if self.progress:
            self.progress(self._done, self.total, MEASURING)
        return Measured(point.values, numbers["loss"], numbers["metric"], seconds, point.recipe, known is not None)

    def _measured(self, point: Point) -> tuple[Numbers, float]:
        """The numbers and how long they took, kept; NaN, which is not kept, where merging gives no weights to run."""
        start = time.perf_counter()
        try:
            numbers = self.numbers(point, self.ruler)
        except NotFinite as error:
            self.unmerged = self.unmerged or error
            nothing: Numbers = {"loss": math.nan, "metric": None if self.ruler.loss else math.nan}
            return nothing, time.perf_counter() - start
        self.facts = {key: self.ruler.facts[key] for key in FACTS}
        seconds = time.perf_counter() - start
        self.kept.add(point.recipe, {"parameters": point.values, **numbers, "seconds": seconds, **self.facts})
        return numbers, seconds

    def numbers(self, point: Point, ruler: Ruler) -> Numbers:
        """Loss and metric of a point."""
        try:
            merged = self.merger.merged(point.recipe)
            placed = self._seat.place(merged)
        except IsomergeError as error:
            error.args = (f"Sweeping, at {said(point.values)}: {error}", *error.args[1:])
            raise
        self.notes += [note for note in merged.notes if note not in self.notes]
        return ruler.at(merged, placed)
