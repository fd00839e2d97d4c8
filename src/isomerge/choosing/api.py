"""`isomerge.best`: several ways of merging, the numbers of the best of them, and the models alone beside it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_types
from isomerge.checking.api import check
from isomerge.choices import ALGORITHMS
from isomerge.choosing.candidates import WayToMerge, ways_to_merge
from isomerge.data.base import DataSource
from isomerge.data.open import open_data
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.merging.recipe import ModelReference
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.sweeping.api import pictures_of, write_results
from isomerge.sweeping.optimisers import require_package
from isomerge.sweeping.points import Point
from isomerge.sweeping.request import MeasuringRequest, OpenedBench
from isomerge.sweeping.result import Sweep, SweepPoint, TriedRecipe
from isomerge.sweeping.search import Searching
from isomerge.sweeping.search_api import concluded, write_model

EVALUATIONS = 60
SEEN = 512
"""Examples that a method sees which needs data."""


@dataclass
class Trying:
    """One way of merging with what was measured of it."""

    way: WayToMerge
    start: SweepPoint
    searching: Searching | None
    seconds: float = 0.0
    points: list[SweepPoint] = field(default_factory=list)

    def search(self, evaluations: int) -> None:
        """Measure until there are so many points beside the start."""
        began = time.perf_counter()
        if self.searching is not None:
            self.points = list(self.searching.measure(evaluations))
        self.seconds += time.perf_counter() - began

    @property
    def measured(self) -> list[SweepPoint]:
        return [self.start, *self.points]


@shows_progress
def best(
    *models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    base: str | os.PathLike[str] | None = None,
    data: DataSource = None,
    task: str | None = None,
    evaluations: int = EVALUATIONS,
    algorithm: str = "bayesian",
    by: str | None = None,
    test: DataSource = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    workers: int | None = None,
    threads: int | None = None,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Shown = None,
) -> Sweep:
    """Find the best way to merge models, one after the other or in a list, or say that one of them is better alone.

    `isomerge.check` says how the models are related; from that follow the ways to try: task arithmetic and TIES where
    a `base` is given, the mean, slerp of two siblings, and for strangers the aligned mean and reconstruct. Each is
    measured as it is; then half of the `evaluations` search the numbers of all of them, and the other half those of the
    best. At the end the best merge, the models and the base are measured once on `test`. The other arguments, the
    result and the files of `out` are those of `isomerge.search`; `candidates` has every way that was tried.

    >>> found = isomerge.best("model-a", "model-b", data="cifar10.tar.xz", algorithm="random", evaluations=4)
    >>> found.says is not None, [row.loss is not None for row in found.candidates or ()][:1]
    (True, [True])
    """
    progress = callback(progress)
    began = time.perf_counter()
    paths = [os.fspath(model) for model in _named(models)]
    require_types(base=(base, str, os.PathLike, None))
    origin = None if base is None else os.fspath(base)
    require_types(evaluations=(evaluations, int), algorithm=(algorithm, str))
    require_choice("algorithm", algorithm, ALGORITHMS)
    if evaluations < 3:
        raise RequestError(
            f"Searching with {evaluations} evaluations: at least 3 are needed. Try 60.", keys=("evaluations",)
        )
    request = MeasuringRequest(
        data, None, task, by, test, batch_size, limit, seed, device, threads, max_memory, out, force, True, progress,
        searching=True, workers=workers,
    )  # fmt: skip
    request.require()
    require_package(algorithm)
    pictures = pictures_of(request.folder, None, "search")
    found = check(*paths, base=origin, progress=progress)
    ways, notes = ways_to_merge(paths, origin, found, _merging_data(data, test), evaluations=evaluations)
    opened = request.open([way.plan for way in ways])
    opened.bench.total = evaluations
    result = _chosen(ways, opened, paths, origin, algorithm, evaluations, seed)
    result.notes = list(dict.fromkeys([found.summary, *notes, *result.notes]))
    result.seconds = time.perf_counter() - began
    write_results(result, request.folder, pictures, "search")
    write_model(result, request)
    return result


def _named(models: Sequence[Any]) -> Sequence[Any]:
    if len(models) == 1 and isinstance(models[0], (list, tuple)):
        models = models[0]
    if len(models) < 2:
        raise RequestError("Looking for the best merge: name at least two models, as in best(a, b).")
    for model in models:
        require_types(models=(model, str, os.PathLike))
    return models


def _merging_data(data: DataSource, test: DataSource) -> dict[str, Any] | None:
    """Examples for methods that need some: the part called train, if the search looks at another one."""
    own = dict(data) if isinstance(data, Mapping) else {"path": data}
    if not isinstance(own.get("path"), (str, os.PathLike)):
        return None
    given = {"path": os.fspath(own.pop("path")), **{key: value for key, value in own.items() if value is not None}}
    train = {**given, "split": "train", "limit": SEEN}
    try:
        others = [open_data(one, prefer="validation") for one in (data, test) if one is not None]
        found = open_data(train)
    except RequestError:  # there is no such part
        return None
    return None if found.sha256 in {one.sha256 for one in others} else train


def _chosen(
    ways: Sequence[WayToMerge],
    opened: OpenedBench,
    models: Sequence[str],
    base: str | None,
    algorithm: str,
    evaluations: int,
    seed: int,
) -> Sweep:
    """Everything as it is, then half of the evaluations for all, and what is left for the best."""
    trying = [one for way in ways if (one := _started(way, opened, algorithm, seed)) is not None]
    if not trying or all(math.isinf(opened.bench.judge.score(one.start)) for one in trying):
        raise CheckpointError(
            f"Looking for the best merge: none of the {len(ways)} ways gives a number: "
            f"{'; '.join(opened.bench.notes[:3]) or 'their predictions are not finite'}. See isomerge check."
        )
    judge = opened.bench.judge
    searched = [one for one in trying if one.searching is not None]
    left = evaluations - len(trying)
    for one in searched:
        one.search(max(0, left // 2 // len(searched)))
    first = min(trying, key=lambda one: judge.score(judge.best(one.measured)))
    first.search(len(first.points) + evaluations - sum(len(one.measured) for one in trying))
    winner = min(trying, key=lambda one: judge.score(judge.best(one.measured)))
    chosen = judge.best(winner.measured)
    references = {ModelReference.parse(model): "model" for model in models}
    if base is not None:
        references[ModelReference.parse(base)] = "base"
    way = winner.way
    result = concluded(way.plan, opened, winner.points, chosen, winner.start, references, algorithm, way.name)
    result.candidates = [_row(one, chosen, opened) for one in trying]
    result.kept = sum(point.kept for one in trying for point in one.measured)
    return result


def _started(way: WayToMerge, opened: OpenedBench, algorithm: str, seed: int) -> Trying | None:
    """Measured as it is; None, with a note, where that cannot be done."""
    bench = opened.bench
    began = time.perf_counter()
    try:
        start = bench.measured(Point({}, way.plan.recipe))
    except IsomergeError as error:
        bench.notes.append(f"{way.name} was left out: {error}")
        return None
    space = way.plan.space
    searching = None if space is None else Searching(bench, space, algorithm, seed)
    return Trying(way, start, searching, time.perf_counter() - began)


def _row(one: Trying, chosen: SweepPoint, opened: OpenedBench) -> TriedRecipe:
    judge = opened.bench.judge
    own = judge.best(one.measured)
    scores = None if own._scores is None or chosen._scores is None else (chosen._scores, own._scores)
    gain = scores[0].gain_over(scores[1], judge.used([own])) if scores else None
    return TriedRecipe(
        name=one.way.name,
        method=one.way.plan.recipe.merge_method,
        parameters=own.parameters,
        loss=own.loss,
        metric=own.metric,
        error=judge.error(own),
        gain=None if gain is None else gain[0],
        gain_error=None if gain is None or math.isnan(gain[1]) else gain[1],
        evaluations=len(one.measured),
        seconds=one.seconds,
    )
