"""`isomerge eval MODEL --data PATH`: loss and metric of a model on real data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isomerge.cli.flags import Data, Model, Reading, Running, Task, data_source
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.verb import verb

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Measure MODEL on data: accuracy, F1, perplexity and others.",
    "isomerge eval model-a --data images.tar.xz --split test",
)
def eval_(
    model: Model, *, data: Data = None, task: Task = None, reading: Reading, running: Running, voice: Voice
) -> None:
    """Measure MODEL on data: accuracy and F1, entity F1, correlation or perplexity, depending on its class."""
    import isomerge

    with voice.work("steps") as progress:
        result = isomerge.evaluate(
            model, data_source(data, reading, running), task, limit=reading.limit, batch_size=running.batch_size,
            device=running.device, seed=running.seed, progress=progress,
        )  # fmt: skip
    record = as_record(result)
    voice.show(record, eval_table)


def eval_table(record: Record) -> RenderableType:
    """What was measured on what, every number, and the notes."""
    from rich.text import Text

    rows = {"model": record["model"], "task": record["task"]}
    if record["data"]:
        rows["data"] = data_used(record)
    rows["loss"] = number(record["loss"])
    rows |= {name: number(value) for name, value in record["metrics"].items()}
    table = listing(header=False)
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    return below(table, *ending(record))


def data_used(record: Record) -> str:
    """The data, and how much of it was used; running text is cut into chunks."""
    data = record["data"]
    if data["kind"] == "corpus":
        return f"{data['name']}, {record['examples']} examples cut from {data['size']} lines"
    return f"{data['name']}, {record['examples']} of {data['size']} examples used"
