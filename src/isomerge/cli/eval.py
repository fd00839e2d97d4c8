"""`isomerge eval MODEL --data PATH`: loss and metric of a model on real data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.cli.common import Debug, Device, Json, Quiet, Seed, Voice
from isomerge.cli.completion import offer

if TYPE_CHECKING:
    from rich.console import RenderableType

# As data.heads.TASKS and data.options.KINDS have them; importing those would import torch.
TASKS = ("image", "sequence", "token", "regression", "causal-lm", "masked-lm", "seq2seq")
KINDS = ("images", "texts", "lines", "documents", "table", "tokens", "corpus")

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A folder or archive of images in class folders; .txt, .jsonl, .csv, .tsv or CoNLL; a folder of those.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        autocompletion=offer(TASKS),
        help=f"{', '.join(TASKS)}; module:function for one of your own; lm-eval:NAME. "
        "Told from the model's class if not named.",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="PART",
        autocompletion=offer(("train", "validation", "test")),
        help="train, validation or test, where data has parts.",
    ),
]
Text = Annotated[
    str | None, typer.Option(metavar="COL", help="The column of the texts: a name, or a position from 0; two as 'a,b'.")
]
Label = Annotated[str | None, typer.Option(metavar="COL", help="The column of the labels; several as 'a,b,c'.")]
Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        autocompletion=offer(KINDS),
        help=f"What the data is: {', '.join(KINDS)}.",
    ),
]
Length = Annotated[int | None, typer.Option(min=2, help="Cut texts to this many tokens; the model's own if not named.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use this many examples, drawn evenly over the data.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Examples at once.")]


def eval_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a file or a hub id.")],
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
    """Measure MODEL on data: accuracy and F1, entity F1, correlation or perplexity, as its class is for."""
    from isomerge.evaluation.evaluate import evaluate

    voice = Voice(json, quiet)
    with voice.work("steps") as progress:
        record = evaluate(
            model,
            data_source(data, split, text, label, kind, length, limit),
            task,
            limit=limit,
            batch_size=batch_size,
            device=device,
            seed=seed,
            progress=progress,
        ).to_dict()
    voice.show(record, eval_table)


def data_source(
    path: Path | None,
    split: str | None,
    text: str | None,
    label: str | None,
    kind: str | None,
    length: int | None,
    limit: int | None,
) -> dict[str, Any] | None:
    """What the flags say of data, as the library takes it."""
    options = {"split": split, "text": text, "label": label, "kind": kind, "length": length, "limit": limit}
    return None if path is None else {"path": str(path), **options}


def eval_table(record: dict[str, Any]) -> RenderableType:
    """What was measured on what, every number, and the notes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Words

    table = Table(box=None, pad_edge=False, show_header=False)
    rows = {"model": record["model"], "task": record["task"]}
    if record["data"]:
        rows["data"] = used(record)
    rows["loss"] = said(record["loss"])
    rows |= {name: said(value) for name, value in record["metrics"].items()}
    for name, value in rows.items():
        table.add_row(Words(name), Words(str(value)))
    notes = [Words(f"note: {note}") for note in record["notes"]]
    return Group(table, *notes, Words(f"{record['seconds']:.1f} s"))


def used(record: dict[str, Any]) -> str:
    """The data, and how much of it was looked at; running text is cut into examples of its own."""
    data = record["data"]
    if data["kind"] == "corpus":
        return f"{data['name']}, {record['examples']} examples cut from {data['size']} lines"
    return f"{data['name']}, {record['examples']} of {data['size']} examples used"


def said(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
