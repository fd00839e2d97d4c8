"""What a curve learns from and what it is measured on: two parts of one data set, or two data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.connectivity.endpoints import reader_for_all
from isomerge.data.base import Batch, Batches, Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.other_data import open_named_test, open_own_test
from isomerge.errors import RequestError
from isomerge.evaluation.example_scores import EveryNth
from isomerge.evaluation.external_tasks import is_custom
from isomerge.evaluation.measure import DataMeasure, LossMeasure

HELD = 4
"""Where data has no other part, every so many-th example is held out to measure on."""
BATCH = 32


@dataclass(frozen=True)
class Parts:
    """Batches to learn from, over and over, and what measures a point."""

    batches: Iterator[Batch]
    measure: DataMeasure | LossMeasure
    notes: list[str]


@dataclass(frozen=True)
class DataReading:
    """How data is read, as `barrier` takes it."""

    task: str | None
    tokenizer: Any
    batch_size: int | None
    limit: int | None
    seed: int
    device: str


def open_parts(
    checkpoints: Sequence[Checkpoint],
    loss: Callable[[Any], Any] | None,
    data: DataSource,
    test: DataSource,
    reading: DataReading,
) -> Parts:
    if loss is not None:
        return Parts(_nothing(), LossMeasure(loss), [])
    learned = open_data(data, tokenizer=reading.tokenizer)
    measured, notes = _measured_on(learned, data, test, reading.tokenizer)
    reader = reader_for_all(checkpoints, learned)
    held = measured is learned
    measure = DataMeasure(
        measured, reading.task, reader, batch_size=reading.batch_size, limit=reading.limit, seed=reading.seed,
        device=reading.device, part=EveryNth(HELD, held=True) if held else None,
    )  # fmt: skip
    batches = learned.passes(
        reader, batch_size=reading.batch_size or BATCH, limit=reading.limit, labels=True, seed=reading.seed,
        device=reading.device, task=None if is_custom(measure.task) else measure.task,
    )  # fmt: skip
    if held:
        if next(EveryNth(HELD, held=True).of(batches)(), None) is None:
            raise RequestError(
                f"Training a curve on {learned.name}: it has fewer than {HELD} examples, so none can be held out to "
                "measure on. Use more data, or name other data with test.",
                keys=("data", "test"),
            )
        batches = EveryNth(HELD, held=False).of(batches)
    notes += [note for note in learned.notes if note not in measure.notes]
    return Parts(_again(batches), measure, notes)


def _measured_on(learned: Data, data: DataSource, test: DataSource, tokenizer: Any) -> tuple[Data, list[str]]:
    """Other data: what is named, or the part of the data that is called test; else the data itself, of which some
    examples are to be held out."""
    if test is not None:
        return _other(test, data, learned, tokenizer), []
    if (part := open_own_test(data, learned, tokenizer)) is not None:
        return part, ["measured on split 'test'"]
    return learned, [f"every {HELD}th example was held out to measure on; `test` names other data for it"]


def _other(test: DataSource, data: DataSource, learned: Data, tokenizer: Any) -> Data:
    measured = open_named_test(test, data, tokenizer)
    if measured.sha256 == learned.sha256:
        raise RequestError(
            f"Training a curve on {learned.name} and measuring it on {measured.name}: they are the same data, so the "
            "losses would be those it was trained for. Name other data, or another split of it.",
            keys=("split", "test"),
        )
    return measured


def _again(batches: Batches) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches():
            empty = False
            yield batch
        if empty:
            raise RequestError(
                "Training a curve: there is no example to learn from. Use more data.", keys=("data", "limit")
            )


def _nothing() -> Iterator[Batch]:
    while True:
        yield {}
