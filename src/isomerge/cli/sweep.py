"""`isomerge sweep RECIPE --over t=0:1:0.1 --data PATH`: many values of a recipe, measured without writing a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import POINTS, RANKINGS, SWEEP_MODES
from isomerge.cli.flags import (
    Address,
    Data,
    Engine,
    MergeFlags,
    MergeMemory,
    Models,
    Reading,
    Running,
    Task,
    Threads,
    choice,
    data_source,
    option,
    switch,
)
from isomerge.cli.interruption import announce_output
from isomerge.cli.output import Progress, Record, Voice, listing, number
from isomerge.cli.request import MergeRequest, read_request
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 50  # rows: a longer table is not read
BEST = 20
UNCHANGED = "unchanged recipe"


@verb(
    "Measure a merge at many values, without writing a model.",
    "isomerge sweep recipe.yml --over t=0:1:0.1 --data images.tar.xz --split validation -o swept",
    method_options=True,
)
def sweep(
    context: typer.Context,
    models: Models,
    *,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="NAME=VALUES",
            help="What to vary: t=0:1:0.1, merge_method=ties,dare_ties, models.1.weight=0:2:0.5, align.level=full. "
            "Repeat it for several parameters; with --search give bounds, as in density=0.1:1.",
        ),
    ] = None,
    data: Data = None,
    task: Task = None,
    mode: Annotated[
        str, choice("--mode", SWEEP_MODES, "With several parameters: every combination, or step by step together.")
    ] = "grid",
    search: Annotated[int | None, option("N", "Search for the best values between bounds, in N evaluations.")] = None,
    by: Annotated[str | None, choice("--by", RANKINGS, "Rank points by loss or metric; loss by default.")] = None,
    test: Annotated[
        Path | None, option("PATH", "Other data, to measure the unchanged recipe and the best point on.")
    ] = None,
    test_split: Annotated[str | None, option("PART", "Which part of --test to use.")] = None,
    out: Annotated[
        Path | None,
        option("DIR", "Keep points, record, picture and best.yml here, and resume from them.", "-o", "--out"),
    ] = None,
    plot: Annotated[Path | None, option("FILE", "Draw the sweep into this .svg or .png.")] = None,
    merging: MergeFlags,
    reading: Reading,
    running: Running,
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    max_memory: MergeMemory = None,
    force: Annotated[
        bool, switch("--force", "Allow more than 1000 points, and a folder that holds other files.")
    ] = False,
    voice: Voice,
) -> None:
    """Measure a recipe, or models merged by a method, at many values; no model is written.

    A method's other options are flags, as for merge: --density 0.5, --lambda 0.8.
    """
    from isomerge.sweeping.points import grid, one_recipe
    from isomerge.sweeping.ranges import read_axes

    request = read_request(models, context)
    require_over(request.models)
    axes = read_axes(over or [], search=search is not None, force=force)
    with data_in_recipe(request):
        example = "isomerge sweep {} --over t=0:1:0.1 --data PATH"
        recipe = one_recipe(request.documents(merging, seed=running.seed, example=example))
    count = len(grid(axes, mode, force=force)) if search is None else search
    if data is None:
        raise RequestError("A sweep measures on data. Add --data PATH.")
    if test_split is not None and test is None:
        raise RequestError("--test-split is a part of --test. Add --test PATH.")
    if out is not None:
        announce_output(out)

    import isomerge

    what = "evaluations at most" if search is not None else "point" if count == 1 else "points"
    line = f"{count} {what} of {', '.join(axis.name for axis in axes)}"
    with voice.work("both") as progress, interruptible(out), data_in_recipe(request):
        swept = isomerge.sweep(
            recipe, over or [], data=data_source(data, reading, running), task=task, mode=mode, search=search, by=by,
            test=test and {"path": str(test), "split": test_split}, batch_size=running.batch_size, seed=running.seed,
            device=running.device, threads=threads, engine=engine, address=address,
            max_memory=max_memory, out=out, plot=plot, force=force,
            same_ids=request.recipe is None and merging.same_ids,
            progress=progress if voice.is_silent else announced(line, progress),
        )  # fmt: skip
    voice.show(swept.record, sweep_table)


def announced(line: str, progress: Progress | None) -> Progress:
    """Print what will be measured when the first point begins: by then every foreseeable mistake has been reported."""
    from isomerge.sweeping.measuring import MEASURING

    waiting = [line]

    def report(done: int, total: int, what: str) -> None:
        if what == MEASURING and waiting:
            print(waiting.pop(), file=sys.stderr)  # not typer's echo, which writes past the bar and into its line
        if progress is not None:
            progress(done, total, what)

    return report


def require_over(models: list[str]) -> None:
    """Values without --over would be taken for a model."""
    if word := next((one for one in models if "=" in one and not Path(one).expanduser().exists()), None):
        raise RequestError(f"'{word}' is not a model. To vary it write --over {word}, once for each name.")


@contextmanager
def data_in_recipe(request: MergeRequest) -> Iterator[None]:
    """If merging itself needs data, say where to name it: here --data is what points are measured on."""
    try:
        yield
    except RequestError as error:
        if request.recipe is not None or "data" not in error.missing:
            raise
        cause = error.__cause__ if isinstance(error.__cause__, RequestError) else error  # without a hint at --data
        raise RequestError(
            f"{cause} In a sweep, --data is what points are measured on; name the data for merging in a recipe, and "
            "sweep that: isomerge sweep recipe.yml --over NAME=VALUES --data PATH."
        ) from error


@contextmanager
def interruptible(out: Path | None) -> Iterator[None]:
    """Say what an interruption leaves."""
    try:
        yield
    except KeyboardInterrupt:
        path = None if out is None else out / POINTS
        done = len(path.read_text(encoding="utf-8").splitlines()) if path is not None and path.exists() else 0
        if done:
            kept = f"{done} measured points are kept in {path} and will not be measured again."
        elif out is not None:
            kept = "No point was measured yet."
        else:
            kept = "The measured points are lost: with -o DIR they are kept, and the same command continues."
        typer.echo(f"isomerge: {kept}", err=True)
        raise


def sweep_table(record: Record) -> RenderableType:
    """Every point with the best marked (of many, the best ones), and the result on the test data."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import duration, verbatim
    from isomerge.sweeping.points import word

    names = [axis["name"] for axis in record["parameters"]]
    metric = record.get("metric_name") or "metric"
    table = listing(*names, "loss", metric, "", numbers=True)
    table.columns[0].justify = "right"
    points, facts = record["points"], []
    if len(points) > SHOWN:
        points = sorted(points, key=lambda point: _rank(point, record))[:BEST]
        facts.append(f"the {BEST} best of {len(record['points'])} points; --json and -o DIR have all of them")
    best = record["best"]
    for point in points:
        cells = [word(point["parameters"][name]) if name in point["parameters"] else "" for name in names]
        table.add_row(*cells, number(point["loss"]), number(point["metric"]), _mark(point, best))

    def measured(what: str, row: dict[str, Any]) -> str:
        return f"{what}: loss {number(row['loss'])}, {metric} {number(row['metric'])}"

    if record.get("start"):
        facts.append(measured(UNCHANGED, record["start"]))
    if best:
        values = ", ".join(f"{name}={word(value)}" for name, value in best["parameters"].items())
        facts.append(measured(f"best ({values or UNCHANGED})", best))
    if test := record.get("test"):
        where = f"on {test['data']['name']}"
        facts += [measured(f"{where}, {what}", test[key]) for key, what in (("start", UNCHANGED), ("best", "best"))]
    lines = [Text(fact) for fact in facts]
    if record.get("out"):
        lines.append(verbatim(f"merge the best: isomerge merge {record['best_recipe']} -o OUT"))
    lines += [Text(f"note: {note}") for note in record["notes"]]
    kept = f", {record['kept']} points from an earlier run" if record["kept"] else ""
    return Group(table, *lines, Text(f"{duration(record['seconds'])}{kept}"))


def _mark(point: dict[str, Any], best: dict[str, Any]) -> str:
    """The best point, and those that are one of the parents."""
    marks = ["best"] if point == best else []
    return ", ".join([*marks, *([f"= {Path(point['parent']).name}"] if point.get("parent") else [])])


def _rank(point: dict[str, Any], record: Record) -> float:
    value = point[record["by"]]
    if value is None or not isfinite(value):
        return float("inf")
    return -value if record["by"] == "metric" and record.get("higher_is_better") is not False else float(value)
