"""Where points are measured: one merged model at a time, on data by its task or by a function of the module."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Data
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.evaluation.external_tasks import is_custom
from isomerge.evaluation.measure import DataMeasure, LossMeasure, Numbers
from isomerge.merging.outcome.merged import Merged, MergedCheckpoint
from isomerge.merging.run.memory import fitting_threads
from isomerge.running.stock import require_runnable
from isomerge.running.weight_replacement import ReusedModule
from isomerge.sweeping.merger import Merger, preparation
from isomerge.sweeping.points import Point, describe_values
from isomerge.sweeping.result import Judge, SweepPoint
from isomerge.sweeping.saved_points import FACTS, SavedPoints

MEASURING = "measuring"
"""How progress calls the points of a sweep."""


class NotFinite(CheckpointError):
    """Merged weights that are no numbers, or too large for their dtype: an answer about a point, as NaN is."""


@dataclass
class SweepMeasure:
    """Data with how it is used. Batches are made once, unless the tokens of the merged model change."""

    data: Data | None
    loss: Callable[[Any], Any] | None
    task: str | None
    batch_size: int | None
    limit: int | None
    seed: int
    device: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Known once something was measured."""
    _made: tuple[Any, Checkpoint, DataMeasure | LossMeasure] | None = None

    def at(self, merged: Merged, module: Any) -> Numbers:
        measure = self.fit(merged)
        numbers = measure.at(module)
        self.facts = {key: measure.facts.get(key) for key in FACTS}
        return numbers

    def fit(self, merged: Merged) -> DataMeasure | LossMeasure:
        """The measure for models with these tokens and this donor; raises where the data is not for them."""
        if self._made is None or self._made[0] is not merged.vocabulary or self._made[1] is not merged.donor:
            reader = _reader(merged)
            measure: DataMeasure | LossMeasure
            if self.data is None:
                assert self.loss is not None
                measure = LossMeasure(self.loss)
            else:
                measure = DataMeasure(
                    self.data, self.task, reader, batch_size=self.batch_size, limit=self.limit, seed=self.seed,
                    device=self.device,
                )  # fmt: skip
            if self.data is not None and not is_custom(self.task):
                _require_labels(self.data, reader, measure.task)
            self._made = merged.vocabulary, merged.donor, measure
        return self._made[2]

    @property
    def notes(self) -> list[str]:
        return list(self.data.notes) if self.data is not None else []


def _reader(merged: Merged) -> Checkpoint:
    """Whose tokenizer or image settings make the batches: the merged model's own."""
    if merged.vocabulary is not None:
        return MergedCheckpoint(merged, "the merged model")
    return open_checkpoint(merged.donor, config=merged.config)


def _require_labels(data: Data, reader: Checkpoint, task: str) -> None:
    """Before anything is aligned or merged."""
    batch = next(iter(data.batches(reader, batch_size=1, limit=1, labels=True, task=task)))
    if "labels" not in batch:
        raise RequestError(
            f"Sweeping on {data.name}: it has no labels. Name their column with label, or use labelled data.",
            keys=("label",),
        )


@dataclass
class Bench:
    """Merges a point into the one module and measures it, unless an earlier run has."""

    merger: Merger
    measure: SweepMeasure
    saved: SavedPoints
    device: str
    by: str | None
    total: int
    progress: Progress | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unmerged: NotFinite | None = None
    """Why the first of the points that have no weights has none."""
    _done: int = 0

    def __post_init__(self) -> None:
        self._module = ReusedModule(self.device)

    @property
    def judge(self) -> Judge:
        return Judge(self.by, self.facts.get("higher_is_better") is not False)

    def measure_all(self, points: Sequence[Point]) -> list[SweepPoint]:
        """Points that share an alignment one after the other, so that only one is held; given back in their order."""
        groups: dict[str, list[int]] = {}
        for number, point in enumerate(points):
            groups.setdefault(preparation(point.recipe), []).append(number)
        measured = {number: self.measured(points[number]) for group in groups.values() for number in group}
        return [measured[number] for number in range(len(points))]

    def measured(self, point: Point) -> SweepPoint:
        if self.progress:
            self.progress(self._done, self.total, MEASURING)
        known = self.saved.find(point.recipe)
        if known is None:
            numbers, seconds = self._new_numbers(point)
        else:
            numbers, seconds = {key: known[key] for key in ("loss", "metric")}, known["seconds"]
            self.facts = {key: known[key] for key in FACTS}
        if self.by is not None and numbers[self.by] is None:
            raise RequestError(f"Sweeping by the {self.by}: this task gives none. Leave by out.", keys=("by",))
        self._done += 1
        if self.progress:
            self.progress(self._done, self.total, MEASURING)
        return SweepPoint(point.values, numbers["loss"], numbers["metric"], seconds, known is not None, point.recipe)

    def _new_numbers(self, point: Point) -> tuple[Numbers, float]:
        """The numbers and how long they took, kept; NaN, which is not kept, where merging gives no weights to run."""
        start = time.perf_counter()
        try:
            numbers = self.numbers(point, self.measure)
        except NotFinite as error:
            self.unmerged = self.unmerged or error
            nothing: Numbers = {"loss": math.nan, "metric": None if self.measure.loss else math.nan}
            return nothing, time.perf_counter() - start
        self.facts = {key: self.measure.facts[key] for key in FACTS}
        seconds = time.perf_counter() - start
        self.saved.add(point.recipe, {"parameters": point.values, **numbers, "seconds": seconds, **self.facts})
        return numbers, seconds

    def numbers(self, point: Point, measure: SweepMeasure) -> Numbers:
        """Loss and metric of a point."""
        try:
            merged = self.merger.merged(point.recipe)
            module = self._put(merged)
        except IsomergeError as error:
            error.args = (f"Sweeping, at {describe_values(point.values)}: {error}", *error.args[1:])
            raise
        self.notes += [note for note in merged.notes if note not in self.notes]
        return measure.at(merged, module)

    def _put(self, merged: Merged) -> Any:
        """The merged weights in the one module, rounded as they would be written."""
        merged.threads = fitting_threads(merged.jobs, merged.threads, merged.max_memory)
        require_runnable(merged.donor)
        wide = any(info.dtype == torch.float64 for info in merged.plan.values())
        dtype = torch.float64 if wide else torch.float32  # as isomerge eval runs what is written
        return self._module.put(merged.config, (merged.config, merged.plan), dtype, _weights(merged))


def _weights(merged: Merged) -> Iterator[tuple[str, Tensor]]:
    """As they would be written; trouble while merging is told apart from trouble with the class."""
    try:
        yield from merged.tensors()
    except CheckpointError as error:
        raise NotFinite(*error.args) from error
