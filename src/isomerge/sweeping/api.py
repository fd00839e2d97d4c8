"""`isomerge.sweep`: one recipe at many values, each merged in memory and measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.data import Data, open_data
from isomerge.errors import CheckpointError, RequestError, did_you_mean
from isomerge.evaluation.device import require_device
from isomerge.evaluation.tasks.run import describe
from isomerge.merging.merged import Merged
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.write import as_data
from isomerge.merging.settings import RunSettings
from isomerge.reporting.plots import can_draw, require_drawable
from isomerge.sweeping.address import of_one_model
from isomerge.sweeping.bench import Bench
from isomerge.sweeping.between import corners, searched, typed
from isomerge.sweeping.kept import Kept, reserve, work_of
from isomerge.sweeping.measuring import Ruler
from isomerge.sweeping.merging import Merger
from isomerge.sweeping.module import NotFinite
from isomerge.sweeping.picture import plot_sweep
from isomerge.sweeping.points import Point, grid, one_recipe, points_of, raise_all, require_different, said
from isomerge.sweeping.ranges import read_axes
from isomerge.sweeping.result import Measured, Sweep, remarks, write

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
    same_ids: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Measure a recipe at many values of its parameters, without writing a model.

    `over` maps names to values: a list, or a text as on the command line ("0:1:0.1", "ties,dare_ties"); with `search`,
    so many evaluations look for the best values between bounds ("0:1"). Names are options of the method,
    `models[1].weight`, `model-b.weight`, or keys of the recipe such as `align.level`. By a task over `data` as in
    `isomerge.evaluate` (of data in parts `validation`, else `train`, unless `split` names another), or by `loss`, a
    function of the module. `test` is other data, on which the recipe as it is and the best point are measured once.
    `out` keeps every point as soon as it is measured, the record, a picture and best.yml; the same call goes on from
    there. `same_ids` is that of `isomerge.merge_recipe`.

    >>> isomerge.sweep("recipe.yml", {"t": "0:1:0.1"}, data="cifar10.tar.xz").best.parameters        # doctest: +SKIP
    {'t': 0.4}
    """
    start = time.perf_counter()
    written = one_recipe(recipe)
    axes = read_axes(over, search=search is not None, force=force)
    _require(data, loss, by, search, test)
    require_device(device)
    planned = points_of(written, grid(axes, mode, force=force) if search is None else corners(axes))
    require_different(planned)
    hint = " ".join(filter(None, (of_one_model(as_data(written), axis.name) for axis in axes)))
    axes = axes if search is None else typed(written, axes)
    folder = Path(out).expanduser() if out is not None else None
    pictures = _pictures(folder, plot)
    if folder is not None:
        reserve(folder, force=force)
    reading: dict[str, Any] = {"kind": kind, "text": text, "label": label, "length": length}
    use: dict[str, Any] = {"task": task, "batch_size": batch_size, "limit": limit, "seed": seed, "device": device}
    opened = None if data is None else open_data(data, split=split, prefer="validation", **reading)
    ruler = Ruler(opened, loss, **use)
    tester = _tester(test, test_split, opened, reading, use)

    merger = Merger(RunSettings(threads, device, max_memory, progress), same_ids=same_ids)
    outline = _outline(merger, planned[0], hint)
    measure = ruler.fit(outline)
    if tester is not None:
        tester.fit(outline)
    merger.open(point.recipe for point in planned)
    _require_mergeable(merger, planned, hint)
    settings: dict[str, Any] = {"limit": limit, "seed": seed, "length": length, "batch_size": batch_size}
    settings["merging on"] = merger.data_of(point.recipe for point in planned)
    kept = Kept(folder, work_of(merger.opened, opened, measure.task, settings) if loss is None else None)
    bench = Bench(merger, ruler, kept, device, by, len(planned) if search is None else search, progress)

    first = None if search is None else bench.measure(Point({}, written))
    points = bench.all(planned) if search is None else searched(bench, written, axes, search - 1, seed)
    best = _best(bench, [*([first] if first else []), *points])
    record = {
        "models": [str(model) for model in written.referenced_models()],
        "method": written.merge_method,
        "mode": mode if search is None else "search",
        "parameters": [axis.record() for axis in axes],
        "task": measure.task,
        "data": describe(opened) if opened is not None else None,
        **_numbers(bench, points, first, best, _tested(bench, tester, written, best) if tester else None),
        "notes": list(dict.fromkeys([*outline.notes, *ruler.notes, *bench.notes, *remarks(points, hint)])),
    }
    record["notes"] += [] if tester else [OPTIMISED]
    record["seconds"] = time.perf_counter() - start
    result = Sweep(points, best, record)
    _leave(result, folder, pictures)
    return result


def _numbers(
    bench: Bench, points: list[Measured], first: Measured | None, best: Measured, tested: dict[str, Any] | None
) -> dict[str, Any]:
    """What was measured, as the record tells it; a search begins with the recipe as it is, the `start`."""
    found: dict[str, Any] = {**bench.facts, "by": bench.judge.used([best])}
    found |= {"points": [point.record() for point in points], "best": best.record()}
    if first is not None:
        found["start"] = first.record()
    if tested is not None:
        found["test"] = tested
    return {**found, "kept": sum(point.kept for point in [*([first] if first else []), *points])}


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


def _outline(merger: Merger, point: Point, hint: str) -> Merged:
    """What is known of the merged models before any is made; a point that cannot be merged says which it is."""
    try:
        return merger.outline(point.recipe)
    except RequestError as error:
        raise_all({_hinted(error, hint): said(point.values)})
        raise


def _hinted(error: RequestError, hint: str) -> str:
    """A complaint about weights is helped by how to write those of one model."""
    return f"{error} {hint}." if hint and "weights" in str(error) else str(error)


def _require_mergeable(merger: Merger, points: Sequence[Point], hint: str) -> None:
    """Every point, as far as headers tell: a sweep of hours must not end at its last one."""
    problems: dict[str, str] = {}
    for point in points:
        try:
            merger.require(point.recipe)
        except RequestError as error:
            problems.setdefault(_hinted(error, hint), said(point.values))
    raise_all(problems)


def _best(bench: Bench, points: list[Measured]) -> Measured:
    best = bench.judge.best(points)
    if math.isfinite(bench.judge.score(best)):
        if bench.unmerged is not None:
            bench.notes.append(f"not every point could be merged; the first that could not: {bench.unmerged}")
        return best
    if bench.unmerged is not None:
        raise CheckpointError(*bench.unmerged.args) from bench.unmerged
    raise CheckpointError(
        f"Sweeping: none of the {len(points)} points gives a number; the first is {said(points[0].parameters)}. "
        "Try smaller values, and see with 'isomerge eval' whether the models themselves are sound."
    )


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
    try:
        start = bench.numbers(Point({}, recipe), tester)
    except NotFinite:  # the best point can do better than a recipe that gives no weights
        start = {"loss": math.nan, "metric": math.nan}
    return {
        "data": describe(tester.data),
        "start": start,
        "best": bench.numbers(Point(best.parameters, best.recipe), tester),
        "examples": tester.facts["examples"],
    }


def _pictures(folder: Path | None, plot: str | Path | None) -> list[Path]:
    """Where to draw: the file that was asked for first, and one beside the other results."""
    if plot is not None:
        require_drawable(Path(plot))
    asked = [] if plot is None else [Path(plot)]
    return [*asked, *([] if folder is None else [folder / "sweep.svg"])]


def _leave(result: Sweep, folder: Path | None, pictures: Sequence[Path]) -> None:
    """The files, named in the record."""
    record = result.record
    if pictures and can_draw():
        for picture in pictures:
            plot_sweep(record, picture)
        record["plot"] = str(pictures[0])
    elif pictures:
        record["notes"].append("no picture was drawn: 'matplotlib' is not installed (pip install isomerge[report])")
    if folder is not None:
        record["out"], record["best_recipe"] = str(folder), str(folder / "best.yml")
        write(result, folder)
