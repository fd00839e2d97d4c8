"""`isomerge barrier A B --data PATH`: loss and metric on the straight line between two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Device, Json, Level, Quiet, Seed, Voice
from isomerge.cli.eval import BatchSize, Data, Kind, Label, Length, Limit, Split, Task, Text, data_source, said
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

Align = Annotated[bool, typer.Option("--align", help="Also measure with B moved next to A, its function unchanged.")]
Points = Annotated[
    int | None, typer.Option(min=2, help="How many points, both ends included: 11 on a line, 13 × 13 on a plane.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the curves, or the map, into this file.")]
Third = Annotated[
    str | None, typer.Argument(metavar="C", help="A third model: measure the plane through all three instead.")
]


def barrier(
    first: Annotated[str, typer.Argument(metavar="A", help="A folder, a file or a hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The model at the other end.")],
    third: Third = None,
    data: Data = None,
    task: Task = None,
    align: Align = False,
    level: Level = "full",
    points: Points = None,
    plot: Plot = None,
    split: Split = None,
    text: Text = None,
    label: Label = None,
    kind: Kind = None,
    length: Length = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = "cpu",
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the models between A and B: how much worse than its ends is the line, before and after alignment?"""
    if data is None:
        raise RequestError("barrier measures on data: name it with --data PATH.")
    if plot is not None and not plot.parent.is_dir():
        raise RequestError(f"--plot {plot}: there is no folder {plot.parent}. Make it first.")
    if level != "full" and not align:
        raise RequestError(f"--level {level} says how --align moves the models, and it is not given. Add --align.")
    import isomerge

    options: dict[str, Any] = {
        "data": data_source(data, split, text, label, kind, length, limit), "task": task, "align": align,
        "level": level, "batch_size": batch_size, "device": device, "seed": seed, "plot": plot,
    }  # fmt: skip
    voice = Voice(json, quiet)
    with voice.work("steps") as progress:
        if third is not None:
            record = isomerge.plane(first, second, third, points=points or 13, progress=progress, **options).to_dict()
        else:
            record = isomerge.barrier(first, second, points=points or 11, progress=progress, **options).to_dict()
    if plot is not None:
        record["plot"] = str(plot)
    voice.show(record, barrier_table if third is None else plane_table)


def barrier_table(record: dict[str, Any]) -> RenderableType:
    """Loss and metric at every point, the barriers, the ensemble and the notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    table = Table(box=None, pad_edge=False)
    lines = [record, *([record["aligned"]] if "aligned" in record else [])]
    metric = record.get("metric_name") or "metric"
    for column in ("t", "loss", metric, *(("loss aligned", f"{metric} aligned") if len(lines) > 1 else ())):
        table.add_column(column, justify="right")
    for rows in zip(*(line["points"] for line in lines), strict=True):
        table.add_row(f"{rows[0]['t']:g}", *(said(row[key]) for row in rows for key in ("loss", "metric")))
    facts = []
    for line, name in zip(lines, ("as they are", "aligned"), strict=False):
        facts.append(f"barrier {name}: {said(line['barrier'])} in loss, {said(line['metric_barrier'])} in {metric}")
    if record["ensemble"]:
        facts.append(
            f"ensemble: loss {said(record['ensemble']['loss'])}, {metric} {said(record['ensemble']['metric'])}"
        )
    notes = [f"note: {note}" for note in record["notes"]]
    return Group(table, *(Words(line) for line in (*facts, *notes, f"{record['seconds']:.1f} s")))


def plane_table(record: dict[str, Any]) -> RenderableType:
    """Where the three models lie, and the best point of the grid."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    table = Table(box=None, pad_edge=False)
    for column in ("model", "x", "y", "loss", record.get("metric_name") or "metric"):
        table.add_column(column)
    for model in record["models"]:
        table.add_row(Words(model["model"]), *(said(model[key]) for key in ("x", "y", "loss", "metric")))
    cells = [
        (value, x, y) for y, row in zip(record["y"], record["loss"], strict=True)
        for x, value in zip(record["x"], row, strict=True) if value is not None and value == value
    ]  # fmt: skip
    best = min(cells, default=None)
    found = "no point of the grid has a loss" if best is None else (
        f"lowest loss on the grid: {said(best[0])} at ({best[1]:.3g}, {best[2]:.3g})"
    )  # fmt: skip
    notes = [f"note: {note}" for note in record["notes"]]
    return Group(table, *(Words(line) for line in (found, *notes, f"{record['seconds']:.1f} s")))
