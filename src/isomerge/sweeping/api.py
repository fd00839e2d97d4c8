"""`isomerge.sweep`: one recipe at many values, each merged in memory and measured."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint.base import Progress
from isomerge.choices import RANKINGS
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.prepared_models import RunSettings
from isomerge.merging.recipe import Recipe
from isomerge.reporting.plots import can_draw, require_drawable
from isomerge.reporting.record import record_text, write_text
from isomerge.running.stock import require_device
from isomerge.sweeping.measuring import Bench, NotFinite, SweepMeasure
from isomerge.sweeping.merger import Merger
from isomerge.sweeping.picture import plot_sweep
from isomerge.sweeping.points import Point, describe_values
from isomerge.sweeping.result import Sweep, SweepPoint, SweepTest, remarks
from isomerge.sweeping.saved_points import SavedPoints, reserve, work_of
from isomerge.sweeping.search import searched
from isomerge.sweeping.sweep_plan import SweepPlan, plan_sweep

OPTIMISED = "these are the data that the values were chosen on, so the best number is too good: measure on other data"


def sweep(
    recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe],
    over: Mapping[str, Any] | Iterable[str],
    *,
    data: DataSource = None,
    task: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    mode: str = "grid",
    search: int | None = None,
    by: str | None = None,
    test: DataSource = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    force: bool = False,
    same_ids: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Measure a recipe at many values of its parameters, without writing a model.

    `over` maps names to values: a list, or a text as on the command line ("0:1:0.1", "ties,dare_ties"); with `search`,
    so many evaluations look for the best values between bounds ("0:1"). Names are options of the method,
    `models[1].weight`, `model-b.weight`, or keys of the recipe such as `align.level`. By a task over `data` as in
    `isomerge.evaluate` (of data in parts `validation`, else `train`, unless its `split` names another), or by `loss`, a
    function of the module. `test` is other data, read like `data`, on which the unchanged recipe and the best point are
    measured once. `out` keeps every point as soon as it is measured, the record, a picture and best.yml; the same call
    continues from there. `same_ids` is that of `isomerge.merge_recipe`.

    >>> sweep = isomerge.sweep("recipe.yml", {"t": "0:1:0.5"}, data="cifar10.tar.xz")
    >>> list(sweep.best.parameters)
    ['t']
    """
    began = time.perf_counter()
    require_types(mode=(mode, str), by=(by, str, None), same_ids=(same_ids, bool))
    require_shared_types(
        task=task, batch_size=batch_size, limit=limit, seed=seed, device=device, threads=threads,
        max_memory=max_memory, out=out, plot=plot, force=force, progress=progress,
    )  # fmt: skip
    _require(data, loss, by, search, test)
    require_device(device)
    plan = plan_sweep(recipe, over, mode=mode, search=search, force=force)
    folder = Path(out).expanduser() if out is not None else None
    pictures = _pictures(folder, plot)
    if folder is not None:
        reserve(folder, force=force)
    opened = None if data is None else open_data(data, prefer="validation")
    limit = opened.limit if opened is not None and limit is None else limit
    use: dict[str, Any] = {"task": task, "batch_size": batch_size, "limit": limit, "seed": seed, "device": device}
    measure = SweepMeasure(opened, loss, **use)
    test_measure = None if test is None else SweepMeasure(_open_test(test, data, opened), None, **use)

    merger = Merger(RunSettings(threads, device, max_memory, progress), same_ids=same_ids)
    outline = plan.outline(merger)
    measured_task = measure.fit(outline).task
    if test_measure is not None:
        test_measure.fit(outline)
    plan.open_models(merger)
    length = data.get("length") if isinstance(data, Mapping) else None
    settings: dict[str, Any] = {"limit": limit, "seed": seed, "length": length, "batch_size": batch_size}
    settings["merging on"] = merger.data_of(point.recipe for point in plan.points)
    saved = SavedPoints(folder, work_of(merger.opened, opened, measured_task, settings) if loss is None else None)
    bench = Bench(merger, measure, saved, device, by, plan.total, progress)
    result = _measured(plan, bench, measured_task, test_measure, outline.notes, seed)
    result.seconds = time.perf_counter() - began
    _write(result, folder, pictures)
    return result


def _measured(
    plan: SweepPlan, bench: Bench, task: str, test: SweepMeasure | None, notes: Sequence[str], seed: int
) -> Sweep:
    """Every point, the best of them, and that one on other data."""
    searching = plan.mode == "search"
    start = bench.measured(Point({}, plan.recipe)) if searching else None
    points = (
        searched(bench, plan.recipe, plan.axes, plan.total - 1, seed) if searching else bench.measure_all(plan.points)
    )
    measured = [start, *points] if start is not None else points
    best = _best(bench, measured)
    tested = None if test is None else _tested(bench, test, plan.recipe, best)
    remarked = dict.fromkeys([*notes, *bench.measure.notes, *bench.notes, *remarks(points, plan.hint)])
    data = bench.measure.data
    return Sweep(
        models=[str(model) for model in plan.recipe.referenced_models()],
        method=plan.recipe.merge_method,
        mode=plan.mode,
        parameters=[axis.record() for axis in plan.axes],
        task=task,
        data=None if data is None else data.describe(),
        **bench.facts,
        by=bench.judge.used([best]),
        points=points,
        best=best,
        start=start,
        test=tested,
        kept=sum(point.kept for point in measured),
        notes=[*remarked, *([] if tested else [OPTIMISED])],
        seconds=0.0,
    )


def _require(data: Any, loss: Any, by: str | None, search: int | None, test: Any) -> None:
    if (data is None) == (loss is None):
        raise RequestError(
            "Sweeping: a sweep measures on data. Pass data, for example a path, or loss=function.", keys=("data",)
        )
    if by is not None:
        require_choice("by", by, RANKINGS)
    if by == "metric" and loss is not None:
        raise RequestError(
            "Sweeping by the metric: loss=function gives no metric. Leave by out, or use data.", keys=("by",)
        )
    require_types(search=(search, int, None))
    if search is not None and search < 3:
        raise RequestError(f"Searching with {search} evaluations: at least 3 are needed. Try 20.", keys=("search",))
    if test is not None and data is None:
        raise RequestError(
            "Sweeping: test is other data of the task, and there is no data. Name it, or leave test out.",
            keys=("data", "test"),
        )


def _best(bench: Bench, points: list[SweepPoint]) -> SweepPoint:
    best = bench.judge.best(points)
    if math.isfinite(bench.judge.score(best)):
        if bench.unmerged is not None:
            bench.notes.append(f"not every point could be merged; the first that could not: {bench.unmerged}")
        return best
    if bench.unmerged is not None:
        raise CheckpointError(*bench.unmerged.args) from bench.unmerged
    first = describe_values(points[0].parameters)
    raise CheckpointError(
        f"Sweeping: none of the {len(points)} points gives a number; the first is {first}. "
        "Try smaller values, and see with 'isomerge eval' whether the models themselves are sound."
    )


def _open_test(test: DataSource, data: DataSource, opened: Data | None) -> Data:
    """Other data, read in the same columns and lengths as that of the sweep unless it says otherwise."""
    if isinstance(test, (str, os.PathLike)):
        test = {"path": test}
    if isinstance(data, Mapping) and isinstance(test, Mapping) and "path" in test:
        test = {**{key: data[key] for key in ("text", "label", "kind", "length") if key in data}, **test}
    test_data = open_data(test, prefer="test")
    if opened is not None and test_data.sha256 == opened.sha256:
        raise RequestError(
            f"Sweeping on {opened.name} and testing on {test_data.name}: they are the same data, so the test would say "
            "nothing. Name other data, or another split of it.",
            keys=("split", "test_split"),
        )
    return test_data


def _tested(bench: Bench, measure: SweepMeasure, recipe: Recipe, best: SweepPoint) -> SweepTest:
    """The recipe as it is and the best point on other data."""
    assert measure.data is not None
    try:
        start = bench.numbers(Point({}, recipe), measure)
    except NotFinite:  # the best point can do better than a recipe that gives no weights
        start = {"loss": math.nan, "metric": math.nan}
    numbers = bench.numbers(Point(best.parameters, best.recipe), measure)
    return SweepTest(measure.data.describe(), start, numbers, measure.facts["examples"])


def _pictures(folder: Path | None, plot: str | Path | None) -> list[Path]:
    """Where to draw: the file that was asked for first, and one beside the other results."""
    if plot is not None:
        require_drawable(Path(plot))
    asked = [] if plot is None else [Path(plot)]
    return [*asked, *([] if folder is None else [folder / "sweep.svg"])]


def _write(result: Sweep, folder: Path | None, pictures: Sequence[Path]) -> None:
    """The files, named in the result."""
    if pictures and can_draw():
        for picture in pictures:
            plot_sweep(result.to_dict(), picture)
        result.plot = str(pictures[0])
    elif pictures:
        result.notes.append("no picture was drawn: 'matplotlib' is not installed (pip install isomerge[report])")
    if folder is not None:
        result.out, result.best_recipe = str(folder), str(folder / "best.yml")
        write_text(folder / "sweep.json", record_text(result.to_dict()))
        write_text(folder / "best.yml", result.recipe.to_yaml())
