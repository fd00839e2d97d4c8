"""`isomerge curve A B --data PATH`: a path or simplex of low loss between two models, and its points as models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import CURVES, LEARN_TOWARDS
from isomerge.cli.barrier import require_folder_of
from isomerge.cli.flags import Data, Force, Level, Reading, Running, Task, choice, data_source, option, switch
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.request import reserve_output
from isomerge.cli.search import TestSplit
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

Point = Annotated[
    list[str] | None,
    option(
        "T",
        "Write this point as a model: t from 0 to 1, or in a simplex one weight per vertex, as in 0.2,0,0.8. With "
        "several points, OUT gets one folder per point.",
        "--point",
    ),
]


@verb(
    "Find a path of low loss between A and B; write any point of it.",
    "isomerge curve model-a model-b --data images.tar.xz --steps 50 --point 0.5 -o out",
)
def curve(
    first: Annotated[str, typer.Argument(metavar="A", help="A folder, a file or a hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model at the other end.")],
    *,
    method: Annotated[
        str,
        choice("--method", CURVES, "A trained path (the first three), simplexes, or the shortest path as functions."),
    ] = "bezier",
    data: Data = None,
    test: Annotated[
        Path | None,
        option("PATH", "Other data to measure on; by default the part called test, or every fourth example."),
    ] = None,
    test_split: TestSplit = None,
    task: Task = None,
    towards: Annotated[
        str | None,
        choice("--towards", LEARN_TOWARDS, "What to train on: the labels of --data (default), or A's and B's answers."),
    ] = None,
    align: Annotated[bool, switch("--align", "Move B next to A first, its function unchanged.")] = False,
    level: Level = "full",
    steps: Annotated[int, option("N", "Batches to train on.", min=1)] = 500,
    rate: Annotated[float, option("R", "First step, relative to the size of the weights.")] = 0.02,
    pivots: Annotated[
        int | None, option("N", "Vertices that learn beside A and B; the method decides by default.", min=0)
    ] = None,
    spread: Annotated[
        float | None, option("X", "What keeps the vertices of a simplex or subspace apart, against the loss.")
    ] = None,
    noise: Annotated[
        float, option("X", "Train and measure with noise on the inputs, relative to their standard deviation.")
    ] = 0.0,
    attack: Annotated[
        float, option("X", "The same with inputs moved where it hurts most, by one gradient step.")
    ] = 0.0,
    samples: Annotated[
        int | None, option("N", "Points to draw from a simplex and average; by default 5.", min=0)
    ] = None,
    points: Annotated[int, option("N", "Number of points to measure, ends included.", min=3)] = 11,
    point: Point = None,
    out: Annotated[Path | None, option("OUT", "The folder to write --point into.", "-o", "--out")] = None,
    plot: Annotated[Path | None, option("FILE.svg", "Draw the path beside the straight line into this file.")] = None,
    force: Force = False,
    reading: Reading,
    running: Running,
    voice: Voice,
) -> None:
    """Train a path or simplex between A and B on which the loss stays low, and measure it beside the straight line."""
    if data is None:
        raise RequestError("curve trains and measures models on data. Add --data PATH.")
    if test_split is not None and test is None:
        raise RequestError("--test-split is a part of --test. Add --test PATH.")
    if level != "full" and not align:
        raise RequestError(f"--level {level} has no effect without --align. Add --align.")
    require_folder_of(plot)
    places = read_points(point, method)
    reserve(out, places, [first, second], force=force)
    import isomerge
    from isomerge.connectivity.curves.methods import METHODS

    require_vertices(places, method, METHODS[method].pivots if pivots is None else pivots)

    with voice.work("steps") as progress:
        found = isomerge.curve(
            first, second, method=method, data=data_source(data, reading, running),
            test=test and {"path": str(test), "split": test_split}, task=task, towards=towards, align=align,
            level=level, steps=steps, rate=rate, pivots=pivots, spread=spread, noise=noise, attack=attack,
            samples=samples, points=points, plot=plot, batch_size=running.batch_size, limit=reading.limit,
            device=running.device, seed=running.seed, progress=progress,
        )  # fmt: skip
        record = as_record(found)
        if out is not None:
            record["written"] = [
                {"point": place, "out": found.save(place, folder, force=force).out}
                for folder, place in folders(out, places).items()
            ]
    if plot is not None:
        record["plot"] = str(plot)
    voice.show(record, curve_table)


def read_points(given: Sequence[str] | None, method: str) -> dict[str, list[float]]:
    """What was typed, and its coordinates."""
    found = {}
    for text in given or ():
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            raise RequestError(f"--point cannot be '{text}'. Write a number, or one per vertex with commas.") from None
        if not all(0 <= x <= 1 for x in numbers):
            raise RequestError(f"--point {text}: numbers go from 0 to 1.")
        if len(numbers) > 1 and method not in ("simplex", "subspace"):
            raise RequestError(f"--point {text}: a {method} path has one number, t. Write --point 0.5.")
        if len(numbers) > 1 and abs(sum(numbers) - 1) > 1e-6:
            raise RequestError(f"--point {text}: the weights of the vertices must add up to 1.")
        found[text] = numbers
    return found


def require_vertices(places: dict[str, list[float]], method: str, pivots: int) -> None:
    """Refuse, before any training, weights that no point of the simplex has."""
    for text, numbers in places.items():
        if len(numbers) not in (1, 2 + pivots):
            raise RequestError(
                f"--point {text}: with {pivots} pivots there are {2 + pivots} vertices. Name a weight each."
            )
        if method == "simplex" and len(numbers) > 1 and numbers[0] * numbers[1] > 0:
            raise RequestError(f"--point {text}: A and B share no simplex. Give one of them, the first two, weight 0.")


def folders(out: Path, places: dict[str, list[float]]) -> dict[Path, list[float]]:
    if len(places) == 1:
        return {out: next(iter(places.values()))}
    return {out / text.replace(" ", ""): numbers for text, numbers in places.items()}


def reserve(out: Path | None, places: dict[str, list[float]], models: Sequence[str], *, force: bool) -> None:
    """Refuse, before any training, an output that could not be written."""
    if (out is None) != (not places):
        raise RequestError("--point names what to write and -o where. Add the other one.")
    if out is None:
        return
    for folder in folders(out, places):
        reserve_output(folder, models, force=force)


def curve_table(record: Record) -> RenderableType:
    """Loss and metric on the trained path and on the straight one; barriers, samples and notes."""
    metric = record.get("metric_name") or "metric"
    lines = [("", record["points"]), (" straight", record["straight"]["points"])]
    if "perturbed" in record:
        perturbed = record["perturbed"], record["straight"]["perturbed"]
        lines += zip((" perturbed", " straight, perturbed"), perturbed, strict=True)
    table = listing("t", *(f"{what}{label}" for label, _ in lines for what in ("loss", metric)), numbers=True)
    for rows in zip(*(points for _, points in lines), strict=True):
        table.add_row(f"{rows[0]['t']:g}", *(number(row[key]) for row in rows for key in ("loss", "metric")))
    facts = [
        f"barrier {name}: {number(line['barrier'])} in loss, {number(line['metric_barrier'])} in {metric}"
        for name, line in ((record["method"], record), ("straight", record["straight"]))
    ]
    facts += [f"{name}: {value}" for name, value in _details(record["training"])]
    together = {"ensemble of A and B": record["ensemble"]}
    if samples := record.get("samples"):
        together[f"ensemble of {len(samples['points'])} samples"] = samples["ensemble"]
    facts += [
        f"{name}: loss {number(one['loss'])}, {metric} {number(one['metric'])}" for name, one in together.items() if one
    ]
    facts += [f"written: {one['out']}" for one in record.get("written", ())]
    return below(table, *facts, *ending(record))


def _details(training: Record) -> list[tuple[str, Any]]:
    """What a method has to say in a line."""
    told = []
    if "length" in training:
        told.append(("length as functions", f"{training['length']:.3f}, straight {training['straight_length']:.3f}"))
    if "cycles" in training:
        told.append(("pivots after each cycle", ", ".join(str(one["pivots"]) for one in training["cycles"])))
    if "log_volumes" in training:
        told.append(("log volume with each vertex", ", ".join(f"{v:.2f}" for v in training["log_volumes"])))
    return told
