"""A student, its teachers and the data: gradient steps towards the teachers' predictions, and where all of them stand.

    loss(batch) = T² · KL( Σ_m w_m softmax(t_m / T) ‖ softmax(s / T) )

with the scores t_m of the teachers and s of the student, and the weights w_m of teachers or, by the goals, of teachers
on each example. The steps are those of `polish`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.evaluation.task_choice import choose_task, task_name
from isomerge.evaluation.tasks import Task
from isomerge.merging.distillation.agreement import agreed_shares
from isomerge.merging.distillation.reading import ModelReader, reading
from isomerge.merging.layerwise.goals import (
    APART,
    Beliefs,
    GoalData,
    OwnedBatches,
    expert_beliefs,
    has_evidence,
    own_beliefs,
    require_evidence,
)
from isomerge.merging.layerwise.gradient_steps import NumberedBatches, PredictionLoss, descend
from isomerge.merging.layerwise.kept_steps import KeptSteps
from isomerge.merging.layerwise.token_matching import OwnTokens, TokenMatch
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.predictions import as_scores, distance, mean_prediction, scores_in

HELD = 2**28
"""Bytes of data that are kept in memory from pass to pass."""
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


class Teaching:
    """Models in memory; the first of `inputs.models` is the student where there is no base."""

    def __init__(
        self, inputs: MergeInputs, shares: Sequence[float], temperature: float, agree: float | None,
        matches: Mapping[int, TokenMatch],
    ) -> None:  # fmt: skip
        self.inputs, self.shares, self.temperature = inputs, list(shares), temperature
        self._agree = agree
        self.checkpoints = [inputs.base or inputs.models[0], *inputs.models]
        tokens = [OwnTokens(place, matches.get(place)) for place in range(len(self.checkpoints))]
        self.student, *self.teachers = (
            ModelReader.load(*pair, inputs.device) for pair in zip(self.checkpoints, tokens, strict=True)
        )
        self._matches = matches

    # --- data ---------------------------------------------------------------------------------------------------------
    def data(self, goals: str) -> tuple[str, GoalData, ExamplesKeptAside]:
        """The goals that auto stands for, the examples to learn from, and those kept aside."""
        parts, new = self._divided(labels=False)
        train, held_out = (
            DataPass(part, device=self.inputs.device, labels=False, hashed=False, budget=HELD) for part in parts
        )
        self._require_same_scores(held_out.first())
        goals = self._resolved(goals, parts[1], held_out)
        held = ExamplesKeptAside(self._believed(goals, parts[1], held_out), self._labelled(), new)
        return goals, self._believed(goals, parts[0], train), held

    def _divided(self, *, labels: bool) -> tuple[list[OwnedBatches], bool]:
        sets = [reading(data, self.checkpoints, self._matches, labels=labels) for data in self.inputs.data]
        *parts, new = OwnedBatches(sets, self.inputs.owners or [range(len(self.teachers))] * len(sets)).divided()
        return parts, new

    def _labelled(self) -> DataPass | None:
        """The examples that are kept aside, where the data has labels that the student's outputs stand for. Nothing is
        learned from them."""
        try:
            (_, part), _ = self._divided(labels=True)
            examples = DataPass(part, device=self.inputs.device, hashed=False)
            return examples if "labels" in examples.first(1) else None
        except RequestError:  # labels of something else
            return None

    def _resolved(self, goals: str, data: OwnedBatches, examples: DataPass) -> str:
        if goals == "own" and not data.apart:
            raise RequestError(
                "distill: goals own needs data for each teacher, and all have the same. Name data beside each teacher, "
                "or use expert goals.",
                keys=("goals", "data"),
            )
        if self._agree is not None and goals not in ("auto", "mean"):
            raise RequestError(
                f"distill: agree chooses the teachers' shares on each batch, and goals {goals} gives them. Use one of "
                "the two.",
                keys=("agree", "goals"),
            )
        if self._agree is not None:
            return "mean"
        if goals == "expert":
            require_evidence(self.student.model, examples, "distill", "own or mean goals")
        if goals != "auto":
            return goals
        if data.apart:
            return "own"
        if len(self.teachers) == 1 or not has_evidence(self.student.model, examples):
            return "mean"
        return "expert" if self._experts(examples)[1] > APART else "mean"

    def _experts(self, examples: DataPass) -> tuple[Beliefs, float]:
        return expert_beliefs(examples, [one.model for one in self.teachers], self.shares, 1.0, first=1)

    def _believed(self, goals: str, data: OwnedBatches, examples: DataPass) -> GoalData:
        if goals == "mean":
            return GoalData(examples, None)
        if goals == "own":
            return GoalData(examples, own_beliefs(data, examples, self.shares))
        return GoalData(examples, self._experts(examples)[0])

    @torch.no_grad()
    def _require_same_scores(self, few: Batch) -> None:
        own = scores_in(self.student.model(**few))
        for checkpoint, given in zip(self.checkpoints[1:], self._loss_on(None).given(few, self._all, own), strict=True):
            shapes = [{name: tuple(scores.shape) for name, scores in one.items()} for one in (own, given)]
            if shapes[0] != shapes[1]:
                raise RequestError(
                    f"distill: {self.checkpoints[0].name} gives {shapes[0]} and {checkpoint.name} gives {shapes[1]} on "
                    "the same two examples. Give models with the same head, labels and vocabulary.",
                    keys=("student", "models"),
                )

    # --- learning -----------------------------------------------------------------------------------------------------
    @property
    def _all(self) -> list[int]:
        return list(range(len(self.teachers)))

    def _loss_on(self, data: Any) -> PredictionLoss:
        agreed = partial(agreed_shares, most=self._agree) if self._agree is not None else None
        return PredictionLoss(
            self.student, self.teachers, self.shares, data, self.temperature, own_tokens=True, shares=agreed
        )

    def learn(self, data: GoalData, steps: int, rate: float) -> None:
        """`steps` steps, of which those that an earlier run has kept are not made again."""
        parameters = [p for p in self.student.model.parameters() if p.is_floating_point()]
        batches = itertools.chain.from_iterable(itertools.repeat(NumberedBatches(data.examples)))
        descend(
            parameters, self._loss_on(data).of, batches, steps, rate,
            lambda step: self.inputs.report(step, steps, "distilling"), KeptSteps(self.inputs.kept, "distilling"),
        )  # fmt: skip

    # --- where they stand ---------------------------------------------------------------------------------------------
    def standing(self, held_out: ExamplesKeptAside, *, alone: bool = False) -> list[dict[str, Any]]:
        """Of the student, each teacher and their mean (of the student `alone`): the distance to the goals on held-out
        examples and, where these have labels, loss and metric."""
        loss = replace(self._loss_on(held_out.data), temperature=1.0)
        names = ["student", *([] if alone else [*(one.name for one in self.inputs.models), "ensemble"])]
        rows = [Standing(name, self._task(held_out)) for name in names]
        with torch.no_grad():
            for number, batch, labels in held_out:
                own = scores_in(self.student.model(**batch))
                given = loss.given(batch, self._all, own)
                every = [own, *([] if alone else [*given, self._ensemble(given)])]
                for row, scores in zip(rows, every, strict=True):
                    row.add(loss, number, batch, scores, given, labels)
        return [row.record() for row in rows]

    def _ensemble(self, given: Sequence[Scores]) -> Scores:
        model, shares = self.student.model, self.shares
        return {
            field: as_scores(model, field, mean_prediction(model, field, [one[field] for one in given], shares))
            for field in given[0]
        }

    def _task(self, held_out: ExamplesKeptAside) -> Task | None:
        first = self.checkpoints[0]
        if held_out.labelled is None:
            return None
        try:
            return choose_task(first.config, task_name(first.config, None, first.name))()
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
