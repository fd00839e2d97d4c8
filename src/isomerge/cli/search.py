"""`isomerge search RECIPE --data PATH`: the best numbers, methods and layer schedules, found by measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import ALGORITHMS, RANKINGS
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
from isomerge.cli.output import Record, Voice, ending, listing, number
from isomerge.cli.request import read_request
from isomerge.cli.sweep import announced, data_in_recipe, interruptible, require_over
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

By = Annotated[str | None, choice("--by", RANKINGS, "Rank merges by loss or metric; loss by default.")]
Test = Annotated[
    Path | None,
    option("PATH", "Other data for the final test; by default the part called test, or every fourth example."),
]
TestSplit = Annotated[str | None, option("PART", "Which part of --test to use.")]
SearchOut = Annotated[
    Path | None,
    option(
        "DIR", "Keep points, record, picture, best.yml and the best model here, and resume from them.", "-o", "--out"
    ),
]
Workers = Annotated[
    int | None,
    option("N", "Measure N merges at once, on one thread each; one by one on all threads by default.", min=1),
]
Algorithm = Annotated[
    str,
    choice("--algorithm", ALGORITHMS, "Gaussian process (bayesian), CMA-ES or random numbers."),
]
WIDEST = 36
"""Of a first column that leaves room for the numbers on a terminal of 80."""
ForceFolder = Annotated[bool, switch("--force", "Allow a folder that holds other files.")]


@verb(
    "Find the best values of a merge, and test them once.",
    "isomerge search recipe.yml --data images.tar.xz --evaluations 16 -o found",
    method_options=True,
)
def search(
    context: typer.Context,
    models: Models,
    *,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="NAME=VALUES",
            help="What may change: density=0.1:1, lambda=0.01:1:log, t=0:1:gradient4, merge_method=ties,dare_ties. "
            "Repeat it for several parameters; by default every weight and number of the recipe.",
        ),
    ] = None,
    data: Data = None,
    task: Task = None,
    evaluations: Annotated[int, option("N", "How many merges to measure.")] = 40,
    algorithm: Algorithm = "bayesian",
    by: By = None,
    l1: Annotated[
        float,
        option(
            "X", "Add X times the sum of all |weights| to the loss that merges are ranked by (LoRAHub: 0.05).", min=0
        ),
    ] = 0.0,
    test: Test = None,
    test_split: TestSplit = None,
    workers: Workers = None,
    out: SearchOut = None,
    plot: Annotated[Path | None, option("FILE", "Draw the search into this .svg or .png.")] = None,
    merging: MergeFlags,
    reading: Reading,
    running: Running,
    threads: Threads = None,
    engine: Engine = "threads",
    address: Address = None,
    max_memory: MergeMemory = None,
    force: ForceFolder = False,
    voice: Voice,
) -> None:
    """Find the best values of a recipe, or of models merged by a method, and compare the merge with its parents.

    Merges are made in memory. At the end the best one, the unchanged recipe, every model and the base are measured once
    on data that the search has not seen.
    """
    from isomerge.sweeping.points import one_recipe

    request = read_request(models, context)
    require_over(request.models)
    with data_in_recipe(request):
        example = "isomerge search {} --data PATH"
        recipe = one_recipe(request.documents(merging, seed=running.seed, example=example))
    require_data(data, test, test_split)
    if out is not None:
        announce_output(out)

    import isomerge

    line = f"{evaluations} evaluations at most"
    with voice.work("both") as progress, interruptible(out), data_in_recipe(request):
        found = isomerge.search(
            recipe, over or None, data=data_source(data, reading, running), task=task, evaluations=evaluations,
            algorithm=algorithm, by=by, l1=l1, test=test and {"path": str(test), "split": test_split}, workers=workers,
            batch_size=running.batch_size, seed=running.seed, device=running.device, threads=threads, engine=engine,
            address=address,
            max_memory=max_memory, out=out, plot=plot, force=force,
            same_ids=request.recipe is None and merging.same_ids,
            progress=progress if voice.is_silent else announced(line, progress),
        )  # fmt: skip
    voice.show(found.record, search_table)


def require_data(data: Path | None, test: Path | None, test_split: str | None) -> None:
    if data is None:
        raise RequestError("A search measures on data. Add --data PATH.")
    if test_split is not None and test is None:
        raise RequestError("--test-split is a part of --test. Add --test PATH.")


def search_table(record: Record) -> RenderableType:
    """The verdict, the best merges beside the models alone, and both on the test data."""
    from rich.console import Group
    from rich.text import Text

    from isomerge.reporting.terminal import verbatim

    metric = record.get("metric_name") or "metric"
    table = listing("", "loss", metric, f"{record['by']} ±", "best gains", numbers=True)

    def add(name: str, row: dict[str, Any], error: float | None) -> None:
        gain = difference(row.get("gain"), row.get("gain_error"))
        table.add_row(Text(name), number(row["loss"]), number(row["metric"]), number(error), gain)

    def add_models(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            add(f"{row['name']} ({row['role']})", row, row["error"])

    add(_at("best", record["best"]), {**record["best"], "gain": None}, record["best"].get("error"))
    if "candidates" in record:
        for row in record["candidates"]:
            add(_at(row["name"], row), row, row["error"])
    else:
        add("unchanged recipe", {**record["start"], "gain": None}, record["start"].get("error"))
    add_models(record["controls"])
    if test := record.get("test"):
        table.add_row(Text(f"test: {test['data']['name']}, {test['examples']} examples", style="bold"))
        add("best", test["best"], test.get("error"))
        if "candidates" not in record:
            add("unchanged recipe", test["start"], None)
        add_models(test["controls"])
    lines = [Text(record["says"], style="bold"), table]
    if record.get("model"):
        lines.append(verbatim(f"written: {record['model']}"))
    elif record.get("out"):
        lines.append(verbatim(f"to merge it all the same: isomerge merge {record['best_recipe']} -o OUT"))
    kept = f"{record['kept']} points from an earlier run" if record["kept"] else ""
    lines += [Text(text) for text in (*ending(record), kept) if text]
    return Group(*lines)


def _at(name: str, row: Record) -> str:
    """A merge with its values; many stand one below the other.

    >>> _at("best", {"parameters": {"t": 0.5}})
    'best: t=0.5'
    >>> print(_at("best", {"parameters": {"models[0].weight": 1, "models[1].weight": 1}}))
    best:
      models[0].weight=1
      models[1].weight=1
    """
    from isomerge.sweeping.points import describe_values

    line = f"{name}: {describe_values(row['parameters'])}"
    if len(line) <= WIDEST or not row["parameters"]:
        return line
    return "\n  ".join([f"{name}:", *(describe_values({key: value}) for key, value in row["parameters"].items())])


def difference(gain: float | None, error: float | None) -> str:
    """
    >>> difference(0.0625, 0.01)
    '0.0625 ± 0.0100'
    """
    return "" if gain is None else number(gain) if error is None else f"{number(gain)} ± {number(error)}"
