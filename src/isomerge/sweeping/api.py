"""`isomerge.sweep`: one recipe at many values, each merged in memory and measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import Checkpoint
from isomerge.data.base import DataSource
from isomerge.engine import Engine, engine_of
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.api import RecipeSource, named_models
from isomerge.merging.plan.models import open_model
from isomerge.merging.recipe import ModelReference, Recipe, recipe_of
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.reporting.plots import require_drawable, why_no_picture
from isomerge.reporting.record import record_text, write_text
from isomerge.sweeping.measuring import Bench, NotFinite, SweepMeasure
from isomerge.sweeping.optimisers import require_package
from isomerge.sweeping.picture import plot_sweep
from isomerge.sweeping.points import Point, describe_values
from isomerge.sweeping.request import MeasuringRequest, OpenedBench
from isomerge.sweeping.result import Sweep, SweepPoint, SweepTest, about_parent, remarks
from isomerge.sweeping.search import Searching
from isomerge.sweeping.sweep_plan import SweepPlan, plan_sweep

BAYESIAN = "bayesian"
OPTIMISED = "these are the data that the values were chosen on, so the best number is too good: measure on other data"


@shows_progress
def sweep(
    recipe: RecipeSource | Recipe | Sequence[Any],
    over: Mapping[str, Any] | Iterable[str],
    *,
    models: Mapping[str, Any] | None = None,
    method: str | None = None,
    base: Any = None,
    align: bool | Mapping[str, Any] = False,
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
    engine: str | Engine = "threads",
    address: str | None = None,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    force: bool = False,
    same_ids: bool = False,
    progress: Shown = None,
    **options: Any,
) -> Sweep:
    """Measure a recipe at many values of its parameters, without writing a model.

    `over` maps names to values: a list, or a text as on the command line ("0:1:0.1", "ties,dare_ties"); with `search`,
    so many evaluations look for the best values between bounds ("0:1"). Names are options of the method,
    `models[1].weight`, `model-b.weight`, or keys of the recipe such as `align.level`. By a task over `data` as in
    `isomerge.evaluate` (of data in parts `validation`, else `train`, unless its `split` names another), or by `loss`, a
    function of the module. `test` is other data, read like `data`, on which the unchanged recipe and the best point are
    measured once. `out` keeps every point as soon as it is measured, the record, a picture and best.yml; the same call
    continues from there. With `engine="ray"` the workers of the cluster at `address` measure a point each, on one
    thread (see docs/cluster.md). `same_ids` and `models` are those of `isomerge.merge_recipe`.

    Instead of a recipe, a list of models as in `isomerge.merge`, with `method`, `base`, `align` and the method's
    `options`.

    >>> sweep = isomerge.sweep("recipe.yml", {"t": "0:1:0.5"}, data="cifar10.tar.xz")
    >>> list(sweep.best.parameters)
    ['t']
    """
    progress = callback(progress)
    began = time.perf_counter()
    require_types(mode=(mode, str), search=(search, int, None))
    require_shared_types(plot=plot)
    request = MeasuringRequest(
        data, loss, task, by, test, batch_size, limit, seed, device, threads, max_memory, out, force, same_ids,
        progress, engine=engine_of(engine, address),
    )  # fmt: skip
    request.require()
    require_evaluations(search, "search")
    if search is not None:
        require_package(BAYESIAN)
    written, given = _requested(recipe, models, method, base, align, options)
    plan = plan_sweep(written, over, mode=mode, search=search, force=force)
    pictures = pictures_of(request.folder, plot, "sweep")
    opened = request.open([plan], given)
    result = _measured(plan, opened, seed)
    result.seconds = time.perf_counter() - began
    write_results(result, request.folder, pictures, "sweep")
    return result


def _requested(
    recipe: Any,
    models: Mapping[str, Any] | None,
    method: str | None,
    base: Any,
    align: bool | Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[Any, dict[ModelReference, Checkpoint]]:
    """The recipe, or that of a list of models, and the models that were passed as objects."""
    require_types(
        models=(models, Mapping, None), method=(method, str, None), align=(align, bool, Mapping),
        recipe=(recipe, str, Path, Mapping, Recipe, Sequence),
    )  # fmt: skip
    listed = not isinstance(recipe, (str, Path, Mapping, Recipe)) and not any(isinstance(r, Recipe) for r in recipe)
    if not listed:
        if method is not None or base is not None or align or options:
            raise RequestError(
                "Sweeping a recipe: it says its method, base, alignment and options itself. Write them there, or pass "
                "a list of models.",
                keys=("method", "base", "align", *options),
            )
        given = {ModelReference.parse(name): model for name, model in (models or {}).items()}
        return recipe, {reference: open_model(reference, model) for reference, model in given.items()}
    if models is not None:
        raise RequestError("Sweeping a list of models: they are named there. Leave models out.", keys=("models",))
    if not recipe or any(isinstance(one, (int, float, type(None))) for one in recipe):
        raise RequestError(f"recipe must be a recipe or a list of models, not {recipe!r:.60}.", keys=("recipe",))
    named, origin, checkpoints = named_models(recipe, base)
    return recipe_of(named, method or "linear", base=origin, options=options, align=align), checkpoints


def _measured(plan: SweepPlan, opened: OpenedBench, seed: int) -> Sweep:
    """Every point, the best of them, and that one on other data."""
    bench = opened.bench
    start = None
    if plan.space is None:
        points = bench.measure_all(plan.points)
    else:
        start = bench.measured(Point({}, plan.recipe))
        points = Searching(bench, plan.space, BAYESIAN, seed).measure(plan.total - 1)
    measured = [start, *points] if start is not None else points
    best = best_of(bench, measured)
    tested = None if opened.test is None else _tested(bench, opened.test, plan.recipe, best)
    result = summary(plan, opened, points, best, start)
    result.test = tested
    result.notes += [] if tested else [OPTIMISED]
    return result


def summary(
    plan: SweepPlan, opened: OpenedBench, points: list[SweepPoint], best: SweepPoint, start: SweepPoint | None
) -> Sweep:
    """The record of what was measured."""
    bench, data = opened.bench, opened.bench.measure.data
    measured = [start, *points] if start is not None else points
    about = [*about_parent(best), *opened.notes, *bench.measure.notes, *bench.notes]
    remarked = dict.fromkeys([*about, *remarks(points, plan.hint)])
    return Sweep(
        models=[str(model) for model in plan.recipe.referenced_models()],
        method=plan.recipe.merge_method,
        mode=plan.mode,
        parameters=[axis.record() for axis in plan.axes],
        task=opened.task,
        data=None if data is None else data.describe(),
        **bench.facts,
        by=bench.judge.used([best]),
        points=points,
        best=best,
        start=start,
        kept=sum(point.kept for point in measured),
        notes=list(remarked),
        seconds=0.0,
    )


def require_evaluations(count: int | None, name: str) -> None:
    if count is not None and count < 3:
        raise RequestError(f"Searching with {count} evaluations: at least 3 are needed. Try 20.", keys=(name,))


def best_of(bench: Bench, points: Sequence[SweepPoint]) -> SweepPoint:
    """The best; an error where no point gives a number."""
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


def _tested(bench: Bench, measure: SweepMeasure, recipe: Recipe, best: SweepPoint) -> SweepTest:
    """The recipe as it is and the best point on other data."""
    assert measure.data is not None
    try:
        start, _ = bench.numbers(Point({}, recipe), measure)
    except NotFinite:  # the best point can do better than a recipe that gives no weights
        start = {"loss": math.nan, "metric": math.nan}
    numbers, _ = bench.numbers(Point(best.parameters, best.recipe), measure)
    return SweepTest(measure.data.describe(), start, numbers, measure.facts["examples"])


def pictures_of(folder: Path | None, plot: str | Path | None, name: str) -> list[Path]:
    """Where to draw: the file that was asked for first, and one beside the other results."""
    if plot is not None:
        require_drawable(Path(plot))
    asked = [] if plot is None else [Path(plot)]
    return [*asked, *([] if folder is None else [folder / f"{name}.svg"])]


def write_results(result: Sweep, folder: Path | None, pictures: Sequence[Path], name: str) -> None:
    """The files, named in the result."""
    why = why_no_picture() if pictures else None
    if pictures and why is None:
        for picture in pictures:
            plot_sweep(result.to_dict(), picture)
        result.plot = str(pictures[0])
    elif pictures:
        result.notes.append(f"no picture was drawn: {why}")
    if folder is not None:
        result.out, result.best_recipe = str(folder), str(folder / "best.yml")
        write_text(folder / f"{name}.json", record_text(result.to_dict()))
        write_text(folder / "best.yml", result.recipe.to_yaml())
