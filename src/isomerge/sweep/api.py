"""`isomerge.sweep`: one recipe at many values, each merged in memory and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isomerge.data import Data, open_data
from isomerge.errors import RequestError, did_you_mean
from isomerge.evaluate.tasks.run import describe
from isomerge.merge.recipe import Recipe
from isomerge.merge.settings import RunSettings
from isomerge.sweep.bench import Bench
from isomerge.sweep.kept import Kept, reserve, work_of
from isomerge.sweep.measuring import Ruler
from isomerge.sweep.merging import Merger
from isomerge.sweep.picture import can_draw, plot_sweep, require_drawable
from isomerge.sweep.points import Point, Values, grid, one_recipe, points_of
from isomerge.sweep.ranges import Axis, read_axes
from isomerge.sweep.result import Measured, Sweep, remarks, write
from isomerge.sweep.search import search as look_for

Progress = Callable[[int, int, str], None]
BY = ("loss", "metric")
OPTIMISED = "these are the data that the values were chosen on, so the best number is too good: measure on other data"


def sweep(
    recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe],
    over: Mapping[str, Any] | Iterable[str],
    *,
    data: Any = None,
    task: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    mode: str = "grid",
    search: int | None = None,
    by: str | None = None,
    test: Any = None,
    test_split: str | None = None,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    kind: str | None = None,
    length: int | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    max_memory: int | str | None = None,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Measure a recipe at many values of its parameters, without writing a model.

    `over` maps names to values: a list, or a text as on the command line ("0:1:0.1", "ties,dare_ties"); with `search`,
    so many evaluations look for the best values between bounds ("0:1"). Names are options of the method,
    `models[1].weight`, `model-b.weight`, or keys of the recipe such as `align.level`. By a task over `data` as in
    `isomerge.evaluate` (of data in parts the validation part, unless `split` names another), or by `loss`, a function
    of the module. `test` is other data, on which the recipe as it is and
    the best point are measured once. `out` keeps every point as soon as it is measured, the record, a picture and
    best.yml; the same call goes on from there.

    >>> isomerge.sweep("recipe.yml", {"t": "0:1:0.1"}, data="cifar10.tar.xz").best.parameters        # doctest: +SKIP
    {'t': 0.4}
    """
    start = time.perf_counter()
    written = one_recipe(recipe)
    axes = read_axes(over, search=search is not None, force=force)
    _require(data, loss, by, search, test)
    planned = points_of(written, grid(axes, mode, force=force) if search is None else _corners(axes))
    axes = axes if search is None else _typed(written, axes)
    folder = Path(out).expanduser() if out is not None else None
    picture = _picture(folder, plot)
    if folder is not None:
        reserve(folder, force=force)
    reading: dict[str, Any] = {"kind": kind, "text": text, "label": label, "length": length}
    use: dict[str, Any] = {"task": task, "batch_size": batch_size, "limit": limit, "seed": seed, "device": device}
    opened = None if data is None else open_data(data, split=split, prefer="validation", **reading)
    ruler = Ruler(opened, loss, **use)
    tester = _tester(test, test_split, opened, reading, use)

    merger = Merger(RunSettings(threads, device, max_memory, progress))
    outline = merger.outline(planned[0].recipe)
    measure = ruler.fit(outline)
    if tester is not None:
        tester.fit(outline)
    merger.open(point.recipe for point in planned)
    settings: dict[str, Any] = {"limit": limit, "seed": seed, "length": length, "batch_size": batch_size}
    settings["merging on"] = [one.record() for one in outline.data]
    kept = Kept(folder, work_of(merger.opened, opened, measure.task, settings) if loss is None else None)
    bench = Bench(merger, ruler, kept, device, by, len(planned) if search is None else search, progress)

    first = None if search is None else bench.measure(Point({}, written))
    points = bench.all(planned) if search is None else _searched(bench, written, axes, search - 1, seed)
    measured = [*([first] if first else []), *points]
    best = bench.judge.best(measured)
    record: dict[str, Any] = {
        "models": [str(model) for model in written.referenced_models()],
        "method": written.merge_method,
        "mode": mode if search is None else "search",
        "parameters": [axis.record() for axis in axes],
        "task": measure.task,
        "data": describe(opened) if opened is not None else None,
        **bench.facts,
        "by": bench.judge.used([best]),
        "points": [point.record() for point in points],
        "best": best.record(),
        **({"start": first.record()} if first else {}),
        **({"test": _tested(bench, tester, written, best)} if tester else {}),
        "kept": sum(point.kept for point in measured),
        "notes": list(dict.fromkeys([*outline.notes, *ruler.notes, *bench.notes, *remarks(points)])),
    }
    if tester is None:
        record["notes"].append(OPTIMISED)
    record["seconds"] = time.perf_counter() - start
    result = Sweep(points, best, record)
    _leave(result, folder, picture)
    return result


def _require(data: Any, loss: Any, by: str | None, search: int | None, test: Any) -> None:
    if (data is None) == (loss is None):
        raise RequestError(
            "Sweeping: a sweep measures on data. Name it with --data PATH (in Python, or loss=function)."
        )
    if by is not None and by not in BY:
        raise RequestError(f"Sweeping: the best point is told by loss or metric, not by '{by}'. {did_you_mean(by, BY)}")
    if by == "metric" and loss is not None:
        raise RequestError("Sweeping by the metric: loss=function gives no metric. Leave by out, or use data.")
    if search is not None and search < 3:
        raise RequestError(f"Searching with {search} evaluations: at least 3 are needed. Try --search 20.")
    if test is not None and data is None:
        raise RequestError(
            "Sweeping: test is other data of the task, and there is no data. Name it, or leave test out."
        )


def _corners(axes: Sequence[Axis]) -> list[Values]:
    """All parameters at their lower and at their upper bound: if these are allowed, so is what lies between."""
    return [{axis.name: axis.bounds[side] for axis in axes if axis.bounds is not None} for side in (0, 1)]


def _typed(recipe: Recipe, axes: Sequence[Axis]) -> list[Axis]:
    """Axes that know whether their parameter takes whole numbers only: the recipe is asked."""

    def takes(values: Values) -> bool:
        try:
            points_of(recipe, [values])
        except RequestError:
            return False
        return True

    low = _corners(axes)[0]
    between = {
        axis.name: axis.bounds[0] + (axis.bounds[1] - axis.bounds[0]) / 2.0001
        for axis in axes
        if axis.bounds is not None
    }
    return [replace(axis, whole=not takes({**low, axis.name: between[axis.name]})) for axis in axes]


def _searched(bench: Bench, recipe: Recipe, axes: Sequence[Axis], evaluations: int, seed: int) -> list[Measured]:
    found: list[Measured] = []

    def score(values: tuple[float, ...]) -> float:
        (point,) = points_of(recipe, [dict(zip((axis.name for axis in axes), values, strict=True))])
        found.append(bench.measure(point))
        return bench.judge.score(found[-1])

    look_for(score, axes, evaluations, seed)
    return found


def _tester(
    test: Any, split: str | None, data: Data | None, reading: dict[str, Any], use: dict[str, Any]
) -> Ruler | None:
    if test is None:
        if split is not None:
            raise RequestError("--test-split is the part of --test, and there is none. Name it with --test PATH.")
        return None
    opened = open_data(test, split=split, prefer="test", **reading)
    if data is not None and opened.sha256 == data.sha256:
        raise RequestError(
            f"Sweeping on {data.name} and testing on {opened.name}: they are the same data, so the test would say "
            "nothing. Name other data, or another part with --split and --test-split."
        )
    return Ruler(opened, None, **use)


def _tested(bench: Bench, tester: Ruler, recipe: Recipe, best: Measured) -> dict[str, Any]:
    """The recipe as it is and the best point on other data."""
    assert tester.data is not None
    return {
        "data": describe(tester.data),
        "start": bench.numbers(Point({}, recipe), tester),
        "best": bench.numbers(Point(best.parameters, best.recipe), tester),
        "examples": tester.facts["examples"],
    }


def _picture(folder: Path | None, plot: str | Path | None) -> Path | None:
    if plot is not None:
        require_drawable(Path(plot))
        return Path(plot)
    return folder / "sweep.svg" if folder is not None else None


def _leave(result: Sweep, folder: Path | None, picture: Path | None) -> None:
    """The files, named in the record."""
    record = result.record
    if picture is not None and can_draw():
        plot_sweep(record, picture)
        record["plot"] = str(picture)
    elif picture is not None:
        record["notes"].append("no picture was drawn: 'matplotlib' is not installed (pip install isomerge[report])")
    if folder is not None:
        record["out"], record["best_recipe"] = str(folder), str(folder / "best.yml")
        write(result, folder)
