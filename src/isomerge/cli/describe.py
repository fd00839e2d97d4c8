"""`isomerge describe MODEL --data PATH`: a small file beside a model, by which it can be found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from isomerge.cli.flags import Data, Force, Model, Reading, Running, data_source, option, switch
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType


@verb(
    "Describe what MODEL was trained on, so that it can be found.",
    "isomerge describe model-a --data images.tar.xz --split train",
)
def describe(
    model: Model,
    *,
    data: Data = None,
    points: Annotated[
        int | None, option("N", "How many points stand for the data; 16, or one per ten examples.", min=1)
    ] = None,
    score: Annotated[bool, switch("--score/--no-score", "Also measure the model on the data.")] = True,
    out: Annotated[
        Path | None, option("FILE", "Where to write; isomerge-description.json beside the weights.", "-o", "--out")
    ] = None,
    reading: Reading,
    running: Running,
    force: Force = False,
    voice: Voice,
) -> None:
    """Write a small file beside MODEL: its task, labels and scores, and weighted points that stand for its data.

    No point is an example of the data. The file is enough to rank the model with isomerge find.
    """
    if data is None:
        raise RequestError("describe looks at the data that the model was trained on. Add --data PATH.")

    import isomerge

    with voice.work("steps") as progress:
        result = isomerge.describe(
            model, data_source(data, reading, running), points=points, score=score, batch_size=running.batch_size,
            limit=reading.limit, seed=running.seed, device=running.device, out=out, force=force, progress=progress,
        )  # fmt: skip
    voice.show(as_record(result), description_table)


def description_table(record: Record) -> RenderableType:
    """What the file says, less the points."""
    from rich.text import Text

    table = listing(header=False)
    labels = record["labels"]
    rows = {
        "model": record["model"],
        "task": record["task"] or "-",
        "labels": "-" if labels is None else ", ".join(labels[:12]) + (" …" if len(labels) > 12 else ""),
        "data": f"{record['examples']} examples in {record['points']} points ({record['features']})",
        "error": number(record["error"]),
        "loss": number(record["loss"]),
        record["metric_name"] or "metric": number(record["metric"]),
        "file": record["file"],
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    return below(table, *ending(record))
