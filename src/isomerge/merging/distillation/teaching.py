"""A student, its teachers and the data: gradient steps towards the teachers' predictions.

    loss(batch) = T² · KL( Σ_m w_m softmax(t_m / T) ‖ softmax(s / T) )

with the scores t_m of the teachers and s of the student, and the weights w_m of teachers or, by the goals, of teachers
on each example. The steps are those of `polish`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.merging.distillation.agreement import agreed_shares
from isomerge.merging.distillation.controls import ExamplesKeptAside
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
from isomerge.merging.layerwise.gradient_steps import NumberedBatches, PredictionLoss
from isomerge.merging.layerwise.token_matching import OwnTokens, TokenMatch
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.gradient_descent import descend
from isomerge.running.kept_steps import KeptSteps
from isomerge.running.passes import DataPass
from isomerge.running.predictions import scores_in

HELD = 2**28
"""Bytes of data that are kept in memory from pass to pass."""


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
        for checkpoint, given in zip(
            self.checkpoints[1:], self.loss_on(None).given(few, range(len(self.teachers)), own), strict=True
        ):
            shapes = [{name: tuple(scores.shape) for name, scores in one.items()} for one in (own, given)]
            if shapes[0] != shapes[1]:
                raise RequestError(
                    f"distill: {self.checkpoints[0].name} gives {shapes[0]} and {checkpoint.name} gives {shapes[1]} on "
                    "the same two examples. Give models with the same head, labels and vocabulary.",
                    keys=("student", "models"),
                )

    # --- learning -----------------------------------------------------------------------------------------------------
    def loss_on(self, data: Any) -> PredictionLoss:
        agreed = partial(agreed_shares, most=self._agree) if self._agree is not None else None
        return PredictionLoss(
            self.student, self.teachers, self.shares, data, self.temperature, own_tokens=True, shares=agreed
        )

    def learn(self, data: GoalData, steps: int, rate: float) -> None:
        """`steps` steps, of which those that an earlier run has kept are not made again."""
        parameters = [p for p in self.student.model.parameters() if p.is_floating_point()]
        batches = itertools.chain.from_iterable(itertools.repeat(NumberedBatches(data.examples)))
        descend(
            parameters, self.loss_on(data).of, batches, steps, rate,
            lambda step: self.inputs.report(step, steps, "distilling"), KeptSteps(self.inputs.kept, "distilling"),
        )  # fmt: skip
