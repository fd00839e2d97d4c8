"""`isomerge sweep RECIPE --over t=0:1:0.1 --data PATH`: many values of a recipe, measured without writing a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Json, Quiet, Voice, choice
from isomerge.cli.completion import offer
from isomerge.cli.errors import announce_output
from isomerge.cli.eval import BatchSize, Data, Kind, Label, Length, Limit, Split, Task, Text, data_source, said
from isomerge.cli.merge import Align, Base, Level, MaxMemory, Method, Models, Threads, Tokenizer, Weights, flags_of
from isomerge.cli.request import DataFlags, Request, read_request
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from isomerge.cli.progress import Progress

Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        metavar="NAME=VALUES",
        help="What to vary: t=0:1:0.1, merge_method=ties,dare_ties, models.1.weight=0:2:0.5, align.level=full. "
        "As often as wanted; with --search bounds, as in density=0.1:1.",
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        metavar="grid|together",
        autocompletion=offer(("grid", "together")),
        callback=choice("--mode", ("grid", "together")),
        help="Of several parameters: every combination, or step by step together.",
    ),
]
Search = Annotated[
    int | None, typer.Option(metavar="N", help="Look for the best values between bounds, in N evaluations.")
]
By = Annotated[
    str | None,
    typer.Option(
        metavar="loss|metric",
        autocompletion=offer(("loss", "metric")),
        callback=choice("--by", ("loss", "metric")),
        help="What the best point is best in.",
    ),
]
Test = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Other data, on which the start and the best point are measured.")
]
TestSplit = Annotated[str | None, typer.Option(metavar="PART", help="The part of --test to use.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="DIR", help="Keep points, record, picture and best.yml here; go on from there."
    ),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sweep into this .svg or .png.")]
SHOWN = 50  # rows: a longer table is not read
BEST = 20
WANTED = ("needs 'data'", "'data' to measure", "the recipe 'data'")  # how a recipe complains that it lacks data


def sweep(
    context: typer.Context,
    models: Models,
    over: Over = None,
    data: Data = None,
    task: Task = None,
    mode: Mode = "grid",
    search: Search = None,
    by: By = None,
    test: Test = None,
    test_split: TestSplit = None,
    out: Folder = None,
    plot: Plot = None,
    method: Method = None,
    weights: Weights = None,
    align: Align = False,
    level: Level = None,
    base: Base = None,
    tokenizer: Tokenizer = None,
    split: Split = None,
    text: Text = None,
    label: Label = None,
    kind: Kind = None,
    length: Length = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Annotated[str, typer.Option(help="Where to merge and run: cpu, cuda, cuda:1, …")] = "cpu",
    threads: Threads = None,
    max_memory: MaxMemory = None,
    seed: Annotated[int, typer.Option(help="Names the examples, their order, and where a search looks.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Measure any number of points; use a folder as it is.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure a recipe, or models merged by a method, at many values; no model is written.

    A method's other options are flags, as for merge: --density 0.5, --lambda 0.8.
    """
    from isomerge.merging.tokens import ROWS
    from isomerge.sweeping.points import grid, one_recipe
    from isomerge.sweeping.ranges import read_axes

    request = read_request([*models, *context.args], flags_of(context))
    _require_over(request.models)
    axes = read_axes(over or [], search=search is not None, force=force)
    with _data_of_its_own(request):
        recipe = one_recipe(
            request.documents(
                method=method,
                base=base,
                weights=weights,
                align=align,
                level=level,
                seed=seed,
                data=DataFlags(),
                tokenizer=tokenizer,
                example="isomerge sweep {} --over t=0:1:0.1 --data PATH",
            )
        )
    count = len(grid(axes, mode, force=force)) if search is None else search
    if data is None:
        raise RequestError("Sweeping needs data to measure on: name it with --data PATH.")
    if test_split is not None and test is None:
        raise RequestError("--test-split is the part of --test, and there is none. Name it with --test PATH.")
    if out is not None:
        announce_output(out)

    import isomerge

    voice = Voice(json, quiet)
    what = "evaluations at most" if search is not None else "point" if count == 1 else "points"
    told = None if json or quiet else f"{count} {what} of {', '.join(axis.name for axis in axes)}"
    with voice.work("both") as progress, _interruptible(out), _data_of_its_own(request):
        found = isomerge.sweep(
            recipe, over or [], data=data_source(data, split, text, label, kind, length, limit), task=task, mode=mode,
            search=search, by=by, test=test and {"path": str(test), "split": test_split}, batch_size=batch_size,
            seed=seed, device=device, threads=threads, max_memory=max_memory, out=out, plot=plot, force=force,
            same_ids=request.recipe is None and tokenizer != ROWS,
            progress=_announced(told, progress) if told else progress,
        )  # fmt: skip
    voice.show(found.record, sweep_table)


def _announced(line: str, progress: Progress | None) -> Progress:
    """Say what will be measured when the first point is: by then every mistake that can be known has been told."""
    from isomerge.sweeping.bench import MEASURING

    waiting = [line]

    def report(done: int, total: int, what: str) -> None:
        if what == MEASURING and waiting:
            print(waiting.pop(), file=sys.stderr)  # not typer's echo, which writes past the bar and into its line
        if progress is not None:
            progress(done, total, what)

    return report


def _require_over(models: list[str]) -> None:
    """Values that lost their --over would be taken for a model."""
    if word := next((one for one in models if "=" in one and not Path(one).expanduser().exists()), None):
        raise RequestError(f"'{word}' is no model. To vary it write --over {word}; --over is given once for each name.")


@contextmanager
def _data_of_its_own(request: Request) -> Iterator[None]:
    """Where merging itself looks at data, say where to name it: here --data is what points are measured on."""
    try:
        yield
    except RequestError as error:
        if request.recipe is not None or not any(words in str(error) for words in WANTED):
            raise
        problem = str(error).partition(" On the command line data is")[0]
        raise RequestError(
            f"{problem} In a sweep --data is what the points are measured on; name the data that merging looks at in a "
            "recipe, and sweep that: isomerge sweep recipe.yml --over NAME=VALUES --data PATH."
        ) from error


@contextmanager
def _interruptible(out: Path | None) -> Iterator[None]:
    """Say what an interruption leaves."""
    try:
        yield
    except KeyboardInterrupt:
        from isomerge.sweeping.saved_points import POINTS

        path = None if out is None else out / POINTS
        done = len(path.read_text(encoding="utf-8").splitlines()) if path is not None and path.exists() else 0
        if done:
            where = f"{done} measured points are kept in {path} and will not be measured again."
        elif out is not None:
            where = "No point was measured yet."
        else:
            where = "The measured points are lost: with -o DIR they are kept, and the same command goes on."
        typer.echo(f"isomerge: {where}", err=True)
        raise


def sweep_table(record: dict[str, Any]) -> RenderableType:
    """Every point with the best marked (of many, the best ones), and what other data say of it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    from isomerge.reporting.terminal import verbatim
    from isomerge.sweeping.points import word

    names = [axis["name"] for axis in record["parameters"]]
    metric = record.get("metric_name") or "metric"
    table = Table(box=None, pad_edge=False)
    for column in (*names, "loss", metric, ""):
        table.add_column(column, justify="right")
    points = record["points"]
    facts = []
    if len(points) > SHOWN:
        points = sorted(points, key=lambda point: _rank(point, record))[:BEST]
        facts.append(f"the {BEST} best of {len(record['points'])} points; --json and -o DIR have all of them")
    best = record["best"]
    for point in points:
        cells = [word(point["parameters"][name]) for name in names]
        table.add_row(*cells, said(point["loss"]), said(point["metric"]), "best" if point == best else "")
    for key, what in (("start", "the recipe as it is"), ("best", "best")):
        if row := record.get(key):
            where = ", ".join(f"{name}={word(value)}" for name, value in row["parameters"].items())
            where = f" ({where or 'the recipe as it is'})" if key == "best" else ""
            facts.append(f"{what}{where}: loss {said(row['loss'])}, {metric} {said(row['metric'])}")
    if test := record.get("test"):
        for key, what in (("start", "the recipe as it is"), ("best", "best")):
            row = test[key]
            told = f"loss {said(row['loss'])}, {metric} {said(row['metric'])}"
            facts.append(f"on {test['data']['name']}, {what}: {told}")
    lines = [Words(fact) for fact in facts]
    if record.get("out"):
        lines.append(verbatim(f"merge the best: isomerge merge {record['best_recipe']} -o OUT"))
    lines += [Words(f"note: {note}") for note in record["notes"]]
    kept = f", {record['kept']} points from an earlier run" if record["kept"] else ""
    return Group(table, *lines, Words(f"{record['seconds']:.1f} s{kept}"))


def _rank(point: dict[str, Any], record: dict[str, Any]) -> float:
    value = point[record["by"]]
    if value is None or not isfinite(value):
        return float("inf")
    return -value if record["by"] == "metric" and record.get("higher_is_better") is not False else value
