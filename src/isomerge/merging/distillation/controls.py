"""Where a student, its teachers and their mean stand on examples that no step was made on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.evaluation.task_choice import choose_task, task_name
from isomerge.evaluation.tasks import Task
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.gradient_steps import PredictionLoss
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.predictions import as_scores, distance, mean_prediction, scores_in

Scores = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExamplesKeptAside:
    """Examples that no step is made on, and their labels where they have some."""

    data: GoalData
    labelled: DataPass | None
    is_new: bool
    """False where there are too few examples to keep some aside."""

    def __iter__(self) -> Iterator[tuple[int, Batch, Tensor | None]]:
        """Number, batch, labels; a reading with labels that hides tokens, or leaves examples out, is another one."""
        labelled: Iterator[Batch] = iter(self.labelled) if self.labelled is not None else itertools.repeat({})
        for number, batch in enumerate(self.data.examples):
            also = next(labelled, {})
            same = all(name in also and torch.equal(also[name], tensor) for name, tensor in batch.items())
            yield number, batch, also.get("labels") if same else None


def standing(
    loss: PredictionLoss, held_out: ExamplesKeptAside, student: Checkpoint, teachers: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Of the student, each teacher and their mean, or of the student alone: the distance to the goals and, where the
    examples have labels, loss and metric."""
    loss = replace(loss, data=held_out.data, temperature=1.0)
    names = ["student", *([] if teachers is None else [*teachers, "ensemble"])]
    rows = [Standing(name, _task(held_out, student)) for name in names]
    with torch.no_grad():
        for number, batch, labels in held_out:
            own = scores_in(loss.merged.model(**batch))
            given = loss.given(batch, range(len(loss.parents)), own)
            every = [own, *([] if teachers is None else [*given, _ensemble(loss, given)])]
            for row, scores in zip(rows, every, strict=True):
                row.add(loss, number, batch, scores, given, labels)
    return [row.record() for row in rows]


def _ensemble(loss: PredictionLoss, given: Sequence[Scores]) -> Scores:
    model = loss.merged.model
    return {
        field: as_scores(model, field, mean_prediction(model, field, [one[field] for one in given], loss.weights))
        for field in given[0]
    }


def _task(held_out: ExamplesKeptAside, student: Checkpoint) -> Task | None:
    if held_out.labelled is None:
        return None
    try:
        return choose_task(student.config, task_name(student.config, None, student.name))()
    except RequestError:  # a body without a head
        return None


class Standing:
    """One row of the controls, summed over batches."""

    def __init__(self, name: str, task: Task | None) -> None:
        self._name, self._task = name, task
        self._distance, self._examples = 0.0, 0

    def add(
        self, loss: PredictionLoss, number: int, batch: Batch, scores: Scores, given: Sequence[Scores],
        labels: Tensor | None,
    ) -> None:  # fmt: skip
        size, model = examples_in(batch), loss.merged.model
        for field, own, theirs, believed in loss.rows(number, batch, scores, given):
            shares = loss.weights if believed is None else believed[:, :, None].to(own)
            self._distance += size * float(distance(model, field, own, [one.to(own) for one in theirs], shares))
        self._examples += size
        if self._task is not None and labels is not None:
            self._task.add(*self._task.predict(scores, labels))

    def record(self) -> dict[str, Any]:
        about: dict[str, Any] = {"model": self._name, "distance": self._distance / self._examples}
        if self._task is None or not self._task.count:
            return about
        score = self._task.result()
        return {**about, "loss": score.loss, score.metric_name: score.metric}
