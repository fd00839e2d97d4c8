"""What sweep, search and best are asked to measure on: data and a task, or a function; and the bench for it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.choices import RANKINGS
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.other_data import open_named_test, open_own_test
from isomerge.engine import Engine, Threads, require_threads
from isomerge.errors import RequestError
from isomerge.evaluation.example_scores import EveryNth
from isomerge.merging.prepared_models import RunSettings
from isomerge.merging.recipe import ModelReference
from isomerge.running.stock import require_device
from isomerge.sweeping.measuring import Bench, Measurement, SweepMeasure
from isomerge.sweeping.merger import Merger
from isomerge.sweeping.points import Point
from isomerge.sweeping.saved_points import SavedPoints, reserve, work_of
from isomerge.sweeping.sweep_plan import SweepPlan

HELD = 4
"""Where data has no other part, every so many-th example is held out for the test."""


@dataclass(frozen=True)
class OpenedBench:
    """A bench, and what stands beside it."""

    bench: Bench
    test: SweepMeasure | None
    task: str
    notes: list[str]


@dataclass(frozen=True)
class MeasuringRequest:
    """Arguments that sweep, search and best share."""

    data: DataSource
    loss: Callable[[Any], Any] | None
    task: str | None
    by: str | None
    test: DataSource
    batch_size: int | None
    limit: int | None
    seed: int
    device: str
    threads: int | None
    max_memory: int | str | None
    out: str | Path | None
    force: bool
    same_ids: bool
    progress: Progress | None
    searching: bool = False
    """Tell what every example scored, and have data for a test."""
    workers: int | None = None
    engine: Engine = field(default_factory=Threads)
    l1: float = 0.0
    """What the sum of the sizes of the weights counts beside the loss."""

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else Path(self.out).expanduser()

    def require(self) -> None:
        """Refuse arguments that are wrong whatever the recipe."""
        require_types(by=(self.by, str, None), same_ids=(self.same_ids, bool), workers=(self.workers, int, None))
        require_shared_types(
            task=self.task, batch_size=self.batch_size, limit=self.limit, seed=self.seed, device=self.device,
            threads=self.threads, max_memory=self.max_memory, out=self.out, force=self.force, progress=self.progress,
        )  # fmt: skip
        if (self.data is None) == (self.loss is None):
            raise RequestError(
                "Sweeping: a sweep measures on data. Pass data, for example a path, or loss=function.", keys=("data",)
            )
        if self.by is not None:
            require_choice("by", self.by, RANKINGS)
        if self.by == "metric" and self.loss is not None:
            raise RequestError(
                "Sweeping by the metric: loss=function gives no metric. Leave by out, or use data.", keys=("by",)
            )
        require_types(l1=(self.l1, float))
        if not 0 <= self.l1 < math.inf or (self.l1 and self.by == "metric"):
            raise RequestError(
                f"Searching: l1 is {self.l1}, which is added to the loss for each unit of weight. Use a number from 0, "
                "and rank by the loss.",
                keys=("l1", "by"),
            )
        if self.test is not None and self.data is None:
            raise RequestError(
                "Sweeping: test is other data of the task, and there is no data. Name it, or leave test out.",
                keys=("data", "test"),
            )
        if self.workers is not None and self.workers < 1:
            raise RequestError(
                "Searching: at least one worker is needed. Leave workers out for one.", keys=("workers",)
            )
        require_device(self.device)

    def open(self, plans: Sequence[SweepPlan], given: Mapping[ModelReference, Checkpoint] | None = None) -> OpenedBench:
        """Everything that can be refused before the first point is measured is refused here. `given`: models that were
        passed as objects, by the names that recipes have for them."""
        if self.folder is not None:
            reserve(self.folder, force=self.force)
        opened = None if self.data is None else open_data(self.data, prefer="validation")
        limit = opened.limit if opened is not None and self.limit is None else self.limit
        test, notes = self._test_data(opened)
        held = self.searching and test is None and opened is not None
        test_data = opened if held else test
        measure = self._measure(opened, limit, EveryNth(HELD, held=False) if held else None)
        test_measure = (
            None if test_data is None else self._measure(test_data, limit, EveryNth(HELD, held=True) if held else None)
        )
        threads = self.threads if self.workers is None else 1
        settings = RunSettings(threads, self.device, self.max_memory, self.progress)
        merger = Merger(settings, same_ids=self.same_ids, given=given or {})
        outline = plans[0].outline(merger)
        task = measure.fit(outline).task
        if test_measure is not None:
            test_measure.fit(outline)
        for plan in plans:
            plan.open_models(merger)
        saved = SavedPoints(self.folder, self._work(merger, opened, task, limit, plans, held))
        bench = Bench(
            merger, measure, saved, self.device, self.by, sum(plan.total for plan in plans), self.progress,
            self.threads if self.engine.name != "threads" and self.workers is None else self.workers, self.engine,
            self.l1, None if self.engine.name == "threads" else self._elsewhere(plans, given),
        )  # fmt: skip
        return OpenedBench(bench, test_measure, task, [*outline.notes, *notes])

    def _elsewhere(
        self, plans: Sequence[SweepPlan], given: Mapping[ModelReference, Checkpoint] | None
    ) -> PointsElsewhere:
        """The same request for a worker, which opens models and data itself."""
        path = self.data.get("path") if isinstance(self.data, Mapping) else self.data
        held = any(model.in_memory for model in (given or {}).values())
        if held or not (path is None or isinstance(path, (str, os.PathLike))):
            require_threads(self.engine, "Sweeping", "models and data have to be files that workers open themselves")
        if self.device != "cpu":
            require_threads(self.engine, "Sweeping", f"workers use no accelerator, and device is {self.device}")
        alone = replace(self, threads=1, out=None, progress=None, workers=None, engine=Threads())
        return PointsElsewhere(alone, tuple(plans))

    def _measure(self, data: Data | None, limit: int | None, part: EveryNth | None) -> SweepMeasure:
        return SweepMeasure(
            data, self.loss, task=self.task, batch_size=self.batch_size, limit=limit, seed=self.seed,
            device=self.device, part=part, each=self.searching, held=self.workers is not None,
        )  # fmt: skip

    def _work(
        self, merger: Merger, data: Data | None, task: str, limit: int | None, plans: Sequence[SweepPlan], held: bool
    ) -> dict[str, Any] | None:
        if self.loss is not None:
            return None
        length = self.data.get("length") if isinstance(self.data, Mapping) else None
        settings: dict[str, Any] = {"limit": limit, "seed": self.seed, "length": length, "batch_size": self.batch_size}
        settings["merging on"] = merger.data_of(point.recipe for plan in plans for point in plan.points)
        if self.searching:
            settings["each"] = [HELD, held]
        return work_of(merger.opened, data, task, settings)

    def _test_data(self, opened: Data | None) -> tuple[Data | None, list[str]]:
        """Other data: what is named, or the part of the data that is called so."""
        if self.test is not None:
            return open_test(self.test, self.data, opened), []
        if not self.searching or opened is None:
            return None, []
        if (part := open_own_test(self.data, opened)) is not None:
            return part, ["using split 'test' for the final test"]
        return None, [f"every {HELD}th example was held out for the final test; `test` names other data for it"]


@dataclass
class PointsElsewhere:
    """Measures points in another process, on a bench of its own that stays from one to the next."""

    request: MeasuringRequest
    plans: Sequence[SweepPlan]
    _bench: Bench | None = None

    def __call__(self, point: Point) -> Measurement:
        if self._bench is None:
            self._bench = self.request.open(self.plans).bench
        return self._bench.measurement(point)


def open_test(test: DataSource, data: DataSource, opened: Data | None) -> Data:
    """Other data than that of the sweep."""
    test_data = open_named_test(test, data)
    if opened is not None and test_data.sha256 == opened.sha256:
        raise RequestError(
            f"Sweeping on {opened.name} and testing on {test_data.name}: they are the same data, so the test would say "
            "nothing. Name other data, or another split of it.",
            keys=("split", "test_split"),
        )
    return test_data
