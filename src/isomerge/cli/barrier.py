"""`isomerge barrier A B --data PATH`: loss and metric on the straight line between two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.flags import Data, Level, Reading, Running, Task, data_source, option, switch
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Measure the models on the line between A and B.",
    "isomerge barrier model-a model-b --data images.tar.xz --align --plot curve.svg",
)
def barrier(
    first: Annotated[str, typer.Argument(metavar="A", help="A folder, a file or a hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model at the other end.")],
    third: Annotated[
        str | None, typer.Argument(metavar="C", help="A third model: measure the plane through all three instead.")
    ] = None,
    *,
    data: Data = None,
    task: Task = None,
    align: Annotated[bool, switch("--align", "Measure again with B aligned to A.")] = False,
    level: Level = "full",
    points: Annotated[
        int | None, option("N", "Number of points, ends included; 11 on a line, 13 × 13 on a plane.", min=2)
    ] = None,
    plot: Annotated[Path | None, option("FILE.svg", "Draw the curves, or the map, into this file.")] = None,
    reading: Reading,
    running: Running,
    voice: Voice,
) -> None:
    """Measure the models between A and B: how much worse than its ends is the line, before and after alignment?"""
    if data is None:
        raise RequestError("barrier measures models on data. Add --data PATH.")
    require_folder_of(plot)
    if level != "full" and not align:
        raise RequestError(f"--level {level} has no effect without --align. Add --align.")
    import isomerge

    options: dict[str, Any] = {
        "data": data_source(data, reading, running), "task": task, "align": align, "level": level, "plot": plot,
        "batch_size": running.batch_size, "device": running.device, "seed": running.seed,
    }  # fmt: skip
    with voice.work("steps") as progress:
        if third is None:
            result: isomerge.results.Result = isomerge.barrier(
                first, second, points=points or 11, progress=progress, **options
            )
        else:
            result = isomerge.plane(first, second, third, points=points or 13, progress=progress, **options)
        record = as_record(result)
    if plot is not None:
        record["plot"] = str(plot)
    voice.show(record, barrier_table if third is None else plane_table)


def require_folder_of(plot: Path | None) -> None:
    if plot is not None and not plot.parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no folder {plot.parent}. Create it first.")


def barrier_table(record: Record) -> RenderableType:
    """Loss and metric at every point, the barriers, the ensemble and the notes."""
    lines = [record, *([record["aligned"]] if "aligned" in record else [])]
    metric = record.get("metric_name") or "metric"
    aligned = ("loss aligned", f"{metric} aligned") if len(lines) > 1 else ()
    table = listing("t", "loss", metric, *aligned, numbers=True)
    for rows in zip(*(line["points"] for line in lines), strict=True):
        table.add_row(f"{rows[0]['t']:g}", *(number(row[key]) for row in rows for key in ("loss", "metric")))
    facts = [
        f"barrier {name}: {number(line['barrier'])} in loss, {number(line['metric_barrier'])} in {metric}"
        for line, name in zip(lines, ("unaligned", "aligned"), strict=False)
    ]
    if together := record["ensemble"]:
        facts.append(f"ensemble: loss {number(together['loss'])}, {metric} {number(together['metric'])}")
    return below(table, *facts, *ending(record))


def plane_table(record: Record) -> RenderableType:
    """Where the three models lie, and the best point of the grid."""
    from rich.text import Text

    table = listing("model", "x", "y", "loss", record.get("metric_name") or "metric")
    for model in record["models"]:
        table.add_row(Text(model["model"]), *(number(model[key]) for key in ("x", "y", "loss", "metric")))
    losses = [
        (loss, x, y)
        for y, row in zip(record["y"], record["loss"], strict=True)
        for x, loss in zip(record["x"], row, strict=True)
        if loss is not None and loss == loss
    ]
    lowest = "no point of the grid has a loss"
    if losses:
        loss, x, y = min(losses)
        lowest = f"lowest loss on the grid: {number(loss)} at ({x:.3g}, {y:.3g})"
    return below(table, lowest, *ending(record))
