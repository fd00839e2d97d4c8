"""`isomerge.search`: the best values of a recipe, found on one part of the data and tested once on another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.choices import ALGORITHMS, MODEL
from isomerge.data.base import DataSource
from isomerge.engine import Engine, engine_of
from isomerge.merging.api import merge_recipe
from isomerge.merging.recipe import ModelReference, Recipe, recipe_of
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.reporting.page import write_report
from isomerge.reporting.record import read_record
from isomerge.sweeping.api import OPTIMISED, best_of, pictures_of, require_evaluations, summary, write_results
from isomerge.sweeping.optimisers import require_package
from isomerge.sweeping.points import Point
from isomerge.sweeping.request import MeasuringRequest, OpenedBench
from isomerge.sweeping.result import Sweep, SweepPoint
from isomerge.sweeping.search import Searching
from isomerge.sweeping.sweep_plan import SweepPlan, plan_sweep
from isomerge.sweeping.verdict import conclude, final_test, measured_controls, models_of

EVALUATIONS = 40


@shows_progress
def search(
    recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe | str | Path],
    over: Mapping[str, Any] | Iterable[str] | None = None,
    *,
    data: DataSource = None,
    task: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    evaluations: int = EVALUATIONS,
    algorithm: str = "bayesian",
    by: str | None = None,
    l1: float = 0.0,
    test: DataSource = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    workers: int | None = None,
    threads: int | None = None,
    engine: str | Engine = "threads",
    address: str | None = None,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    force: bool = False,
    same_ids: bool = False,
    progress: Shown = None,
) -> Sweep:
    """Find the best values of a recipe's parameters, and say whether the merge beats the models it is made of.

    A list of models is searched as the recipe of their mean.

    `over` names what may change: numbers between bounds ("0:1", "0.01:1:log", "0:1:gradient4" for four numbers over the
    layers), or choices ("ties,dare_ties"). If nothing is named, the weight of every model and the other numbers of the
    recipe vary over their natural range. `evaluations` counts the merges that are made in memory and measured, the
    unchanged recipe among them. At the end the best merge, the unchanged recipe, every model and the base are measured
    once on `test`; without it on the part of the data that is called test, or on every fourth example, which the search
    then does not see. `l1` is added to the loss for each unit of weight that a recipe gives its models, so that models
    that do not help get none (LoRAHub: 0.05). `workers` points are measured at once, on one thread each; for the same
    seed the result is the same for every number of workers, and with `engine="ray"`, where the cluster at `address`
    measures them. `out` keeps points, record and best.yml, and the same call continues from there; it also gets the
    folder `model`, unless one of the models alone is at least as good. Other arguments are those of `isomerge.sweep`.

    >>> found = isomerge.search("recipe.yml", {"t": "0:1"}, data="cifar10.tar.xz", algorithm="random", evaluations=5)
    >>> len(found.points), list(found.best.parameters) in ([], ["t"]), found.test is not None
    (4, True, True)
    """
    progress = callback(progress)
    began = time.perf_counter()
    require_types(evaluations=(evaluations, int), algorithm=(algorithm, str))
    require_shared_types(plot=plot)
    require_choice("algorithm", algorithm, ALGORITHMS)
    request = MeasuringRequest(
        data, loss, task, by, test, batch_size, limit, seed, device, threads, max_memory, out, force, same_ids,
        progress, searching=True, workers=workers, engine=engine_of(engine, address), l1=l1,
    )  # fmt: skip
    request.require()
    require_evaluations(evaluations, "evaluations")
    require_package(algorithm)
    plan = plan_sweep(_recipe(recipe), over, mode="grid", search=evaluations, force=force)
    pictures = pictures_of(request.folder, plot, "search")
    opened = request.open([plan])
    result = _found(plan, opened, algorithm, seed)
    result.seconds = time.perf_counter() - began
    write_results(result, request.folder, pictures, "search")
    write_model(result, request)
    return result


def _recipe(given: Any) -> Any:
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, (str, os.PathLike)) for one in given):
        return recipe_of([os.fspath(one) for one in given], "linear")
    return given


def _found(plan: SweepPlan, opened: OpenedBench, algorithm: str, seed: int) -> Sweep:
    bench = opened.bench
    assert plan.space is not None
    start = bench.measured(Point({}, plan.recipe))
    points = Searching(bench, plan.space, algorithm, seed).measure(plan.total - 1)
    return concluded(plan, opened, points, best_of(bench, [start, *points]), start, models_of(plan.recipe), algorithm)


def concluded(
    plan: SweepPlan,
    opened: OpenedBench,
    points: list[SweepPoint],
    best: SweepPoint,
    start: SweepPoint,
    models: Mapping[ModelReference, str],
    algorithm: str,
    way: str | None = None,
) -> Sweep:
    """Compare the best with every model alone, test it, and say what came out. `models` have their role."""
    bench = opened.bench
    for point in [start, *points]:
        bench.judge.compare(point, start)
    controls = measured_controls(bench, models, bench.measure)
    for one in controls:
        one.against(best, bench.judge)
    tested = None if opened.test is None else final_test(bench, opened.test, plan.recipe, best, models)
    result = summary(plan, opened, points, best, start)
    result.controls, result.test, result.algorithm = controls, tested, algorithm
    result.notes += [] if tested else [OPTIMISED]
    result.notes += [f"points are ranked by the loss + {bench.l1:g} Σ |weight|"] if bench.l1 else []
    conclude(result, bench.judge, way)
    return result


def write_model(result: Sweep, request: MeasuringRequest) -> None:
    """Write the best merge below the folder of the search, with the search on its page."""
    if request.folder is None or result.keep is not None:
        return
    out = request.folder / MODEL
    merged = merge_recipe(
        [result.recipe], threads=request.threads, device=request.device, max_memory=request.max_memory,
        same_ids=request.same_ids, progress=request.progress,
    )  # fmt: skip
    written = merged.save(out, force=out.exists())
    merged.verify(written)
    merged.write_report(written)
    write_report(out, {**read_record(out), "search": result.to_dict()})
    result.model = str(out)
