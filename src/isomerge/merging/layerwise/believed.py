"""Who is believed on the examples of a reconstruction, and what goals they call for where none are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isomerge.errors import RequestError
from isomerge.merging.layerwise.goals import (
    APART,
    HELD_OUT,
    Beliefs,
    GoalData,
    OwnedBatches,
    expert_beliefs,
    has_evidence,
    own_beliefs,
    require_evidence,
    token_beliefs,
)
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.passes import DataPass
from isomerge.running.stock import load_stock, read_weights


class Believed:
    """Who is believed on which examples, whatever part of the data they are."""

    def __init__(self, goals: str, temperature: float, run: LayerwiseMerge, *, by_token: bool) -> None:
        self._goals, self._temperature, self._run, self._by_token = goals, temperature, run, by_token

    def on(self, data: OwnedBatches, examples: DataPass) -> GoalData:
        return GoalData(examples, self._beliefs(data, examples))

    def divided(self, data: OwnedBatches) -> tuple[GoalData, GoalData]:
        """Most examples, and those kept aside to choose by."""
        *parts, new = data.divided()
        if not new:
            self._run.parents.notes.append(
                f"a data set has fewer than {HELD_OUT} examples: what was chosen on held-out examples has seen them"
            )
        train, held_out = (
            self.on(part, DataPass(
                part, device=self._run.inputs.device, labels=False, hashed=False, budget=self._run.budget // 8
            ))
            for part in parts
        )  # fmt: skip
        return train, held_out

    def _beliefs(self, data: OwnedBatches, examples: DataPass) -> Beliefs | None:
        shares = self._run.shares
        if self._goals == "own":
            return own_beliefs(data, examples, shares)
        if self._goals == "expert":
            require_evidence(self._run.others[0], examples, "reconstruct", "own or mean goals")
            if self._by_token:
                return self._of_tokens(examples)
            return expert_beliefs(examples, self._run.others, shares, self._temperature)[0]
        return None

    def _of_tokens(self, examples: DataPass) -> Beliefs:
        run = self._run
        found = None if run.matches else token_beliefs(examples, run.others, run.shares, self._temperature)
        if found is None:
            raise RequestError(
                "reconstruct: a posterior of each token needs language models of one vocabulary that read from left to "
                "right. Use that of each example.",
                keys=("posterior",),
            )
        return found


def resolved_goals(
    goals: str, temperature: float, data: OwnedBatches, inputs: MergeInputs, shares: Sequence[float]
) -> tuple[str, float | None]:
    """The goals that auto stands for, and how far apart the models' evidence is, where that decided."""
    if goals == "own" and not data.apart:
        raise RequestError(
            "reconstruct: goals own needs data for each model, and all models have the same. Name data beside each "
            "model, or use expert goals.",
            keys=("goals", "data"),
        )
    if goals != "auto":
        return goals, None
    if not min(shares) > 0:
        return "mean", None  # weights that joint features have no use for
    if data.apart:
        return "own", None
    if not all(model.config for model in inputs.models):
        return "mean", None
    models: list[Any] = [load_stock({**m.config, "use_cache": False}, read_weights(m)) for m in inputs.models]
    models = [model.to(inputs.device) for model in models]
    examples = DataPass(data, device=inputs.device, labels=False, hashed=False)
    if not has_evidence(models[0], examples):
        return "mean", None
    _, apart = expert_beliefs(examples, models, shares, temperature)
    return ("expert" if apart > APART else "mean"), apart
