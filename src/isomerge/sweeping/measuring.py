"""Where points are measured: one merged model at a time, on data by its task or by a function of the module."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Data
from isomerge.engine import Engine, Threads
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.evaluation.example_scores import EveryNth, ExampleScores
from isomerge.evaluation.external_tasks import is_custom
from isomerge.evaluation.measure import DataMeasure, LossMeasure, Numbers
from isomerge.merging.data_methods import DATA_METHODS
from isomerge.merging.outcome.merged import Merged, MergedCheckpoint
from isomerge.merging.run.memory import fitting_threads
from isomerge.running.stock import require_runnable
from isomerge.running.weight_replacement import ReusedModule
from isomerge.sweeping.merger import Merger, preparation
from isomerge.sweeping.parents import ParentSearch
from isomerge.sweeping.points import Point, describe_values
from isomerge.sweeping.result import Judge, SweepPoint
from isomerge.sweeping.saved_points import FACTS, SavedPoints
from isomerge.threads import workers

Measured = tuple[Numbers, ExampleScores | None]
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
    part: EveryNth | None = None
    each: bool = False
    """Tell what every example scored."""
    held: bool = False
    """Prepare all batches at once: several points are measured at the same time."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Known once something was measured."""
    _made: tuple[Any, Checkpoint, DataMeasure | LossMeasure] | None = None

    def at(self, merged: Merged, module: Any, lock: AbstractContextManager[Any]) -> Measured:
        with lock:
            measure = self.fit(merged)
        numbers, scores = measure.scored(module) if self.each else (measure.at(module), None)
        self.facts = {key: measure.facts.get(key) for key in FACTS}
        return numbers, scores

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
                    device=self.device, part=self.part,
                )  # fmt: skip
                if self.held:
                    measure.hold()
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


@dataclass(frozen=True)
class Measurement:
    """What measuring a point has given, wherever that was."""

    numbers: Numbers
    scores: ExampleScores | None
    seconds: float
    parent: str | None
    """The model that the point is."""
    facts: dict[str, Any]
    notes: list[str]
    unmerged: NotFinite | None = None
    """Why there are no weights to run."""


@dataclass
class Bench:
    """Merges a point into a module and measures it, unless that was done before."""

    merger: Merger
    measure: SweepMeasure
    saved: SavedPoints
    device: str
    by: str | None
    total: int
    progress: Progress | None = None
    workers: int | None = None
    """So many points at once, each on one thread; None: one after the other, each on as many as there are."""
    engine: Engine = field(default_factory=Threads)
    l1: float = 0.0
    """What the sum of the sizes of the weights counts beside the loss."""
    elsewhere: Callable[[Point], Measurement] | None = None
    """Measures a point in another process, where the engine has some."""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unmerged: NotFinite | None = None
    """Why the first of the points that have no weights has none."""
    _done: int = 0

    def __post_init__(self) -> None:
        self._own = threading.local()  # every worker has a module, and a point
        self._one_at_a_time = threading.RLock()

    @property
    def judge(self) -> Judge:
        return Judge(self.by, self.facts.get("higher_is_better") is not False, self.l1)

    def measure_all(self, points: Sequence[Point]) -> list[SweepPoint]:
        """Points that share an alignment one after the other, so that only one is held; given back in their order."""
        groups: dict[str, list[int]] = {}
        for number, point in enumerate(points):
            groups.setdefault(preparation(point.recipe), []).append(number)
        order = [number for group in groups.values() for number in group]
        if self.elsewhere is not None:
            measured = self._measured_elsewhere(points, order)
        elif self.workers is None or len(order) < 2:
            measured = {number: self.measured(points[number]) for number in order}
        else:
            with workers(self.workers) as pool:
                measured = dict(zip(order, pool.map(self.measured, [points[n] for n in order]), strict=True))
        return [measured[number] for number in range(len(points))]

    def _measured_elsewhere(self, points: Sequence[Point], order: Sequence[int]) -> dict[int, SweepPoint]:
        """Those that are not known by the workers of the engine; each is kept here as soon as it is measured."""
        assert self.elsewhere is not None
        new = [number for number in order if self.saved.find(points[number].recipe) is None]
        measured = {number: self.measured(points[number]) for number in order if number not in new}

        def take(place: int, found: Measurement) -> None:
            measured[new[place]] = self._point(points[new[place]], found)

        folders = [model.folder for model in self.merger.opened.values() if model.folder is not None]
        self.engine.each(
            self.elsewhere, [points[number] for number in new], take, threads=self.workers, visible=folders
        )
        return measured

    def measured(self, point: Point) -> SweepPoint:
        self._report()
        return self._point(point, None if self.saved.find(point.recipe) is not None else self.measurement(point))

    def _point(self, point: Point, found: Measurement | None) -> SweepPoint:
        """What was found now, kept; or what is known."""
        known = self.saved.find(point.recipe) if found is None else None
        if found is not None:
            self._keep(point, found)
            numbers, scores, seconds, parent = found.numbers, found.scores, found.seconds, found.parent
        else:
            assert known is not None
            parent = known["parent"]
            numbers, seconds = {key: known[key] for key in ("loss", "metric")}, known["seconds"]
            scores = None if known["each"] is None else ExampleScores.read(known["each"])
            self.facts = {key: known[key] for key in FACTS}
        if self.by is not None and numbers[self.by] is None:
            raise RequestError(f"Sweeping by the {self.by}: this task gives none. Leave by out.", keys=("by",))
        with self._one_at_a_time:
            self._done += 1
        self._report()
        return SweepPoint(
            point.values, numbers["loss"], numbers["metric"], seconds, known is not None, parent, point.recipe, scores
        )

    @property
    def _parent(self) -> str | None:
        """The model that this worker's last point is."""
        parents: ParentSearch | None = self._own.__dict__.get("parents")
        return None if parents is None else parents.found

    def _report(self) -> None:
        if self.progress:
            self.progress(min(self._done, self.total), self.total, MEASURING)

    def measurement(self, point: Point) -> Measurement:
        """The numbers and how long they took; NaN where merging gives no weights to run."""
        start, told = time.perf_counter(), len(self.notes)
        try:
            numbers, scores = self.numbers(point, self.measure)
        except NotFinite as error:
            nothing: Numbers = {"loss": math.nan, "metric": None if self.measure.loss else math.nan}
            return Measurement(nothing, None, time.perf_counter() - start, self._parent, {}, [], error)
        facts = {key: self.measure.facts[key] for key in FACTS}
        return Measurement(numbers, scores, time.perf_counter() - start, self._parent, facts, self.notes[told:])

    def _keep(self, point: Point, found: Measurement) -> None:
        """A point without weights is not kept."""
        if found.unmerged is not None:
            self.unmerged = self.unmerged or found.unmerged
            return
        self.facts = found.facts
        told = {"parent": found.parent, **({} if found.scores is None else {"each": found.scores.saved()})}
        with self._one_at_a_time:
            self.notes += [note for note in found.notes if note not in self.notes]
            self.saved.add(
                point.recipe,
                {"parameters": point.values, **found.numbers, "seconds": found.seconds, **found.facts, **told},
            )

    def numbers(self, point: Point, measure: SweepMeasure) -> Measured:
        """Loss and metric of a point, and what every example scored where that is asked for."""
        try:
            with self._one_at_a_time:
                merged = self.merger.merged(point.recipe)
            module = self._put(merged)
        except IsomergeError as error:
            error.args = (f"Sweeping, at {describe_values(point.values)}: {error}", *error.args[1:])
            raise
        self.notes += [note for note in merged.notes if note not in self.notes]
        return measure.at(merged, module, self._one_at_a_time)

    def _put(self, merged: Merged) -> Any:
        """The merged weights in the one module of this worker, rounded as they would be written."""
        merged.threads = fitting_threads(merged.jobs, merged.threads, merged.max_memory)
        require_runnable(merged.donor)
        wide = any(info.dtype == torch.float64 for info in merged.plan.values())
        dtype = torch.float64 if wide else torch.float32  # as isomerge eval runs what is written
        module = self._own.__dict__.setdefault("module", ReusedModule(self.device))
        # Building a class sets the dtype of the whole program for a moment, and a method for whole models builds some.
        structure = (merged.config, merged.plan)
        self._own.parents = ParentSearch(merged)
        alone = merged.recipe.merge_method in DATA_METHODS or merged.recipe.repair or not module.copies(structure)
        with self._one_at_a_time if alone else contextlib.nullcontext():
            return module.put(merged.config, structure, dtype, _weights(merged, self._own.parents))


def _weights(merged: Merged, parents: ParentSearch) -> Iterator[tuple[str, Tensor]]:
    """As they would be written; trouble while merging is told apart from trouble with the class."""
    try:
        for job, (name, tensor) in zip(merged.jobs, merged.tensors(), strict=True):
            parents.look(job, tensor)
            yield name, tensor
    except CheckpointError as error:
        raise NotFinite(*error.args) from error
