"""`isomerge ensemble A B … --data PATH`: the mean prediction of several models, beside each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Device, Json, Quiet, Seed, Voice
from isomerge.cli.eval import BatchSize, Data, Kind, Label, Length, Limit, Split, Task, Text, data_source, said, used

if TYPE_CHECKING:
    from rich.console import RenderableType


def ensemble(
    models: Annotated[list[str], typer.Argument(metavar="A B …", help="Folders, files or hub ids; at least two.")],
    data: Data = None,
    task: Task = None,
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
    """Measure the mean of the models' probabilities on data, beside each model alone: what a merge can aim for."""
    import isomerge

    voice = Voice(json, quiet)
    with voice.work("steps") as progress:
        record = isomerge.ensemble(
            models, data_source(data, split, text, label, kind, length, limit), task, batch_size=batch_size,
            device=device, seed=seed, progress=progress,
        ).to_dict()  # fmt: skip
    voice.show(record, ensemble_table)


def ensemble_table(record: dict[str, Any]) -> RenderableType:
    """Loss and every metric of each model, and of all together."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    table = Table(box=None, pad_edge=False)
    metrics = list(record["ensemble"]["metrics"])
    for column in ("model", "loss", *metrics):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in [*record["models"], {"model": "ensemble", **record["ensemble"]}]:
        table.add_row(Words(row["model"]), said(row["loss"]), *(said(row["metrics"][name]) for name in metrics))
    notes = [f"note: {note}" for note in record["notes"]]
    return Group(table, *(Words(line) for line in (used(record), *notes, f"{record['seconds']:.1f} s")))
