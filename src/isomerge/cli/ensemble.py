"""`isomerge ensemble A B …`: measure, save, or write texts with several models together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomerge.choices import COMBINATIONS
from isomerge.cli.eval import data_used
from isomerge.cli.flags import Data, Force, Reading, Running, Task, choice, data_source, option
from isomerge.cli.output import Record, Voice, as_record, below, ending, listing, number
from isomerge.cli.verb import verb
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from isomerge.ensembling.module import Ensemble


TOKENS = 64


@dataclass(frozen=True)
class Combining:
    """How the models' predictions become one."""

    combination: Annotated[
        str,
        choice(
            "--combination",
            COMBINATIONS,
            "Mean probability or logit, majority, weighted mean, linear model (stacked), by the text so far.",
        ),
    ] = "probability"
    weights: Annotated[str | None, option("LIST", "One number per model, as in 0.7,0.3; equal by default.")] = None
    held_out: Annotated[
        Path | None,
        option("PATH", "Labelled data to find weights or a stack on; the validation part of --data by default."),
    ] = None
    ridge: Annotated[float | None, option("X", "Penalty of the stacked linear model; by default 0.1.")] = None
    snapshots: Annotated[
        int | None, option("N", "Of a training run's folder, take the last N checkpoint-… folders.", min=1)
    ] = None


@dataclass(frozen=True)
class Writing:
    """What is written: the ensemble, or texts."""

    save: Annotated[
        Path | None, option("PATH", "Write the manifest of the ensemble: a .json file, or a folder for ensemble.json.")
    ] = None
    force: Force = False
    generate: Annotated[
        Path | None,
        option("FILE", "Continue each line of this text file, with the models choosing every token together."),
    ] = None
    rank: Annotated[
        str | None,
        option(
            "likelihood|MODEL",
            "With --generate: each model writes its own text, and the best is taken, as all of them or MODEL judge.",
        ),
    ] = None
    tokens: Annotated[int, option("N", "With --generate: most tokens to write after a prompt.", min=1)] = TOKENS


@verb(
    "Measure what models predict together, save that, or write texts.",
    "isomerge ensemble model-a model-b --data images.tar.xz --split test",
)
def ensemble(
    models: Annotated[
        list[str], typer.Argument(metavar="A B …", help="Folders, files or hub ids; or one saved ensemble.")
    ],
    *,
    data: Data = None,
    task: Task = None,
    combining: Combining,
    writing: Writing,
    reading: Reading,
    running: Running,
    voice: Voice,
) -> None:
    """Measure what the models predict together, beside each model alone: what a merge can aim for. With --save, keep it
    as one object that Python loads; with --generate, write texts."""
    _require(data, writing)
    import isomerge

    start = time.perf_counter()
    given: dict[str, Any] = vars(combining) | {"weights": _weights(combining.weights), "device": running.device}
    more: dict[str, Any] = {"task": task, "batch_size": running.batch_size, "seed": running.seed}
    with voice.work("steps") as progress:
        if writing.generate is not None:
            ways = {name: given[name] for name in ("combination", "weights", "snapshots", "device")}
            texts = isomerge.generate(
                models, _prompts(writing.generate), rank=writing.rank, tokens=writing.tokens, progress=progress, **ways
            )
            record, table = as_record(texts), texts_table
        else:
            if combining.held_out is not None:
                given["held_out"] = {**(data_source(combining.held_out, reading, running) or {}), "split": None}
            if data is None and writing.save is not None:
                made = isomerge.make_ensemble(models, progress=progress, **given, **more)
                record, table = _kept(made, made.save(writing.save, force=writing.force), start), saved_table
            else:
                result = isomerge.ensemble(
                    models, data_source(data, reading, running), save=writing.save, force=writing.force,
                    progress=progress, **given, **more,
                )  # fmt: skip
                record, table = as_record(result), ensemble_table
    voice.show(record, table)


def _require(data: Path | None, writing: Writing) -> None:
    if writing.generate is None and writing.rank is not None:
        raise RequestError("--rank compares texts that the models write. Add --generate FILE.")
    if writing.generate is None and writing.tokens != TOKENS:
        raise RequestError("--tokens is the length of the texts that the models write. Add --generate FILE.")
    if writing.generate is not None and (data is not None or writing.save is not None):
        raise RequestError("--generate writes texts, and neither measures nor saves. Leave --data and --save out.")


def _weights(given: str | None) -> list[float] | None:
    from isomerge.cli.request import numbers

    return None if given is None else numbers(given, given.count(",") + 1)


def _kept(made: Ensemble, path: Path, start: float) -> Record:
    """What is said of an ensemble that was saved and not measured."""
    return {
        "saved": str(path), "models": [{"model": one.checkpoint.name} for one in made.stock], "task": made.task,
        "combination": made.combination.name, "weights": made.shares.weights.tolist(), "notes": list(made.notes),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def _prompts(file: Path) -> list[str]:
    from isomerge.json_files import read_text

    try:
        lines = [line.strip() for line in read_text(file).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text in UTF-8"
        raise RequestError(
            f"--generate {file}: it cannot be read ({why}). Name a file with one prompt per line."
        ) from error
    if not (found := [line for line in lines if line]):
        raise RequestError(f"--generate {file}: there is no text in it. Write one prompt per line.")
    return found


def ensemble_table(record: Record) -> RenderableType:
    """Loss and every metric of each model, and of all together."""
    from rich.text import Text

    metrics = list(record["ensemble"]["metrics"])
    weighs = len({round(one, 9) for one in record["weights"]}) > 1
    table = listing("model", *(["weight"] if weighs else []), "loss", *metrics, numbers=True)
    together = {"model": f"ensemble ({record['combination']})", **record["ensemble"]}
    for row, weight in zip([*record["models"], together], [*record["weights"], None], strict=True):
        shares = [number(weight)] if weighs else []
        table.add_row(Text(row["model"]), *shares, number(row["loss"]), *(number(row["metrics"][m]) for m in metrics))
    return below(table, data_used(record), *_place(record), *ending(record))


def saved_table(record: Record) -> RenderableType:
    """The members and their weights."""
    from rich.text import Text

    table = listing("model", "weight", numbers=True)
    for row, weight in zip(record["models"], record["weights"], strict=True):
        table.add_row(Text(row["model"]), number(weight))
    return below(table, f"combination: {record['combination']}", *_place(record), *ending(record))


def texts_table(record: Record) -> RenderableType:
    """What was written after each prompt; where texts were ranked, by whom, and all others."""
    from rich.text import Text

    ranked = record["rank"] is not None
    table = listing("prompt", *(["model", "wins"] if ranked else []), "text")
    for output in record["outputs"]:
        if not ranked:
            table.add_row(Text(output["prompt"]), Text(output["text"]))
            continue
        for row in sorted(output["candidates"], key=lambda row: row["text"] != output["text"]):
            table.add_row(Text(output["prompt"]), Text(row["model"]), f"{row['wins']:.2f}", Text(row["text"]))
    return below(table, *ending(record))


def _place(record: Record) -> list[str]:
    return [f"saved: {record['saved']}"] if "saved" in record else []
