"""`isomerge ensemble A B … --data PATH`: the mean prediction of several models, beside each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isomerge.cli.eval import data_used
from isomerge.cli.flags import Data, Reading, Running, Task, data_source
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Measure the mean of the models' probabilities on data.",
    "isomerge ensemble model-a model-b --data images.tar.xz --split test",
)
def ensemble(
    models: Annotated[list[str], typer.Argument(metavar="A B …", help="Folders, files or hub ids; at least two.")],
    *,
    data: Data = None,
    task: Task = None,
    reading: Reading,
    running: Running,
    voice: Voice,
) -> None:
    """Measure the mean of the models' probabilities on data, beside each model alone: what a merge can aim for."""
    import isomerge

    with voice.work("steps") as progress:
        result = isomerge.ensemble(
            models, data_source(data, reading, running), task, batch_size=running.batch_size, device=running.device,
            seed=running.seed, progress=progress,
        )  # fmt: skip
    record = as_record(result)
    voice.show(record, ensemble_table)


def ensemble_table(record: Record) -> RenderableType:
    """Loss and every metric of each model, and of all together."""
    from rich.text import Text

    metrics = list(record["ensemble"]["metrics"])
    table = listing("model", "loss", *metrics, numbers=True)
    for row in [*record["models"], {"model": "ensemble", **record["ensemble"]}]:
        table.add_row(Text(row["model"]), number(row["loss"]), *(number(row["metrics"][name]) for name in metrics))
    return below(table, data_used(record), *ending(record))
