"""Look for the best values of a space in so many evaluations: points are proposed, merged in memory and measured."""

from __future__ import annotations

import math

from isomerge.errors import RequestError
from isomerge.sweeping.measuring import Bench
from isomerge.sweeping.optimisers import OPTIMISERS, Unit
from isomerge.sweeping.points import Point, Values, describe_values
from isomerge.sweeping.result import SweepPoint
from isomerge.sweeping.space import Space

PATIENCE = 5
"""After so many batches in a row without a new point, all of a space has been measured."""


class Searching:
    """One search, which may be continued: what was measured stays measured, and more evaluations go on from there."""

    def __init__(self, bench: Bench, space: Space, algorithm: str, seed: int) -> None:
        self.space = space
        self.points: list[SweepPoint] = []
        self._bench = bench
        self._proposals = OPTIMISERS[algorithm](space.dimensions, seed)
        self._batch: list[Unit] = []
        self._scores: list[float] = []
        self._known: dict[str, float] = {}
        """The score of every recipe that was proposed; infinite where it cannot be merged."""
        self._refused: list[str] = []

    def measure(self, evaluations: int) -> list[SweepPoint]:
        """Measure until there are so many points, or nothing new is proposed. Values that do not go together are the
        worst, and end nothing."""
        barren = 0
        while len(self.points) < evaluations and barren < PATIENCE:
            if len(self._scores) == len(self._batch):
                self._batch = self._proposals.send(self._scores) if self._batch else next(self._proposals)
                self._scores = []
            before = len(self._known)
            self._measure_batch(evaluations - len(self.points))
            barren = 0 if len(self._known) > before else barren + 1
        self._mention_refused()
        return self.points

    def _measure_batch(self, room: int) -> None:
        """The rest of the batch, as far as there is room for new points."""
        keys: list[str | None] = []
        new: dict[str, Point] = {}
        for unit in self._batch[len(self._scores) :]:
            point = self._point(self.space.values(unit))
            key = None if point is None else point.recipe.to_yaml()
            if key is not None and point is not None and key not in self._known and key not in new:
                if len(new) == room:
                    break
                new[key] = point
            keys.append(key)
        measured = self._bench.measure_all(list(new.values()))
        self.points += measured
        self._known |= {key: self._bench.judge.rank(one) for key, one in zip(new, measured, strict=True)}
        self._scores += [math.inf if key is None else self._known[key] for key in keys]

    def _point(self, values: Values) -> Point | None:
        """None where these values cannot be merged."""
        try:
            (point,) = self.space.points([values])
            self._bench.merger.require(point.recipe)
        except RequestError as error:
            self._refused.append(f"{describe_values(values)}: {error}")
            return None
        return point

    def _mention_refused(self) -> None:
        refused = list(dict.fromkeys(self._refused))
        if refused:
            count = f"{len(refused)} of the points tried" if len(refused) > 1 else "one of the points tried"
            note = f"{count} cannot be merged; the first is {refused[0]}"
            self._bench.notes[:] = [one for one in self._bench.notes if not one.endswith(refused[0])] + [note]
