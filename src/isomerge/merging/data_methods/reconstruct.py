"""Merging by features: every linear map of the merged model is solved again, towards the features of its parents.

In the order in which they run, on the inputs X that a map has in the merged model so far:

    W = argmin ‖X W − T‖² + ‖Λ^½ (W − W̄)‖²,  Λ = diag(ridge · G_jj + floor · mean diag G),  G = XᵀX

with W̄ the average and T the parents' outputs or, for maps that write to the residual stream, the parents' streams
minus the merged model's own: their mean, or on each example those of the parent that knows it (`goals`). No labels are
needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from isomerge.arguments import require_choice
from isomerge.data.base import Batches
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.candidates import Candidates, finite
from isomerge.merging.layerwise.goals import (
    APART,
    GOALS,
    HELD_OUT,
    Beliefs,
    GoalData,
    OwnedBatches,
    expert_beliefs,
    has_evidence,
    own_beliefs,
)
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each
from isomerge.running.passes import DataPass
from isomerge.running.stock import load_stock, read_weights

FEATURES = ("auto", "mean", "joint")
OUTPUTS = ("auto", "scores", "predictions")
LEANS = ("auto", "no")
STARTS = ("auto", "merge", "parent", "best")


@data_method(data="together", passes="every model, once per linear map, as far as the map")
def reconstruct(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    goals: str = "auto",
    temperature: float = 1.0,
    features: str = "auto",
    lean: str = "auto",
    output: str = "auto",
    refine: int = 0,
    polish: int = 0,
    start: str = "auto",
    ridge: float = 1e-2,
    floor: float = 1e-6,
    cache: str = "2GB",
) -> MergedWeights:
    """Solve every linear map again, so that layer by layer the features are those of the models.

    Options:
        weight: how much of each model, divided by their sum
        goals: whose features count: the mean of all models', each model's own on its own data, or on each example those of the expert, the model that finds it likely or is sure of its answer. auto is own where models have data of their own, else expert where the models know different things, else mean
        temperature: of the expert's posterior; more lets others speak, too
        features: mean of the models', or joint, one model's width out of all models side by side. auto is mean for goals of that name, and joint for others
        lean: auto lets a joint stream lean to one model where this predicts held-out examples better, unless weights or mean goals are given; no keeps the weights
        output: fit the output map to scores as all maps, or to predictions. auto is scores for mean goals, and predictions for others
        refine: gradient steps on each block after it was solved
        polish: gradient steps on the whole model at the end, towards the models' predictions
        start: what is polished: the merge, one parent, or the best of all these on held-out examples. auto is best with polish and goals other than mean, and merge otherwise
        ridge: how strongly weights are held at the average, as a share of what each input varies
        floor: the same, as a share of what all inputs of a map vary on average
        cache: memory that spares running finished layers again, as 2GB; 0 switches it off
    """  # noqa: E501
    _check(goals, features, lean, output, start, refine, polish, temperature)
    passes = [data.passes(inputs.models[0]) for data in inputs.data]
    data = OwnedBatches(passes, inputs.owners or [range(len(inputs.models))] * len(passes))
    goals, apart = _resolved(goals, temperature, data, inputs, inputs.shares(weight))
    mean = goals == "mean"
    joint = features == "joint" or (features == "auto" and not mean)
    if joint and not min(weight) > 0:
        raise RequestError(
            f"reconstruct: joint features need positive weights, and these are {weight}. Leave out models without "
            "weight."
        )
    together: Batches = (lambda: itertools.chain.from_iterable(one() for one in passes)) if mean else data
    run = LayerwiseMerge(inputs, weight, [together], cache, joint=joint, refine=refine > 0)
    fits = output == "predictions" or (output == "auto" and not mean)
    candidates = Candidates(run, joint, ridge, floor, refine, fits)
    believed = _Believed(goals, temperature, run)
    every = believed.on(data, run.examples[0])
    record: dict[str, Any] = {"goals": {"kind": goals}}
    if every.beliefs is not None:
        record["goals"]["examples"] = every.beliefs.totals()
    if apart is not None:
        record["goals"]["apart"] = apart
    if start == "auto":
        start = "best" if polish and not mean else "merge"
    leans = joint and not mean and start != "parent" and lean == "auto" and len(set(weight)) == 1
    parts = believed.divided(data) if leans or start != "merge" else None
    shares = list(run.shares)
    if leans and parts:
        shares, record["lean"] = candidates.best_lean(*parts)
    record |= _finished(candidates, shares, start, polish, every, parts)
    return run.result(record)


def _finished(
    candidates: Candidates,
    shares: Sequence[float],
    start: str,
    polish: int,
    every: GoalData,
    parts: tuple[GoalData, GoalData] | None,
) -> dict[str, Any]:
    """The merge, a parent, or the best of them, polished; what was chosen from stands in the record."""

    def fit(number: int, data: GoalData, name: str = "") -> dict[str, Any]:
        """The merge (-1) or a parent."""
        record = candidates.merge(shares, data, name) if number < 0 else candidates.parent(number, data, name)
        return record | ({"polished": candidates.polish(polish, data, name)} if polish else {})

    if start == "merge":
        return fit(-1, every)
    assert parts is not None
    train, held_out = parts
    names = [model.name for model in candidates.run.inputs.models]
    tried = []
    for number in range(-1 if start == "best" else 0, len(names)):
        fit(number, train, f"start-{number + 1}-")
        tried.append((finite(candidates.loss(held_out)), number))
    best = min(tried)[1]
    said = {number: "the merge" if number < 0 else names[number] for _, number in tried}
    starts = [
        {"start": said[number], "model": None if number < 0 else number, "held_out": loss} for loss, number in tried
    ]
    chosen = next(one for one, (_, number) in zip(starts, tried, strict=True) if number == best)
    return fit(best, every) | {"start": {"chosen": chosen["start"], "model": chosen["model"], "tried": starts}}


class _Believed:
    """Who is believed on which examples, whatever part of the data they are."""

    def __init__(self, goals: str, temperature: float, run: LayerwiseMerge) -> None:
        self._goals, self._temperature, self._run = goals, temperature, run

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
            if not has_evidence(self._run.others[0], examples):
                raise RequestError(
                    "reconstruct: goals expert needs models that score classes or tokens, of which one holds. Use own "
                    "or mean goals.",
                    keys=("goals",),
                )
            return expert_beliefs(examples, self._run.others, shares, self._temperature)[0]
        return None


def _resolved(
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
    first = inputs.models[0]
    shapes = [{name: info.shape for name, info in model.tensors.items()} for model in inputs.models]
    if not all(model.config for model in inputs.models) or any(one != shapes[0] for one in shapes):
        return "mean", None
    models: list[Any] = [load_stock({**first.config, "use_cache": False}, read_weights(m)) for m in inputs.models]
    models = [model.to(inputs.device) for model in models]
    examples = DataPass(data, device=inputs.device, labels=False, hashed=False)
    if not has_evidence(models[0], examples):
        return "mean", None
    _, apart = expert_beliefs(examples, models, shares, temperature)
    return ("expert" if apart > APART else "mean"), apart


def _check(
    goals: str, features: str, lean: str, output: str, start: str, refine: int, polish: int, temperature: float
) -> None:
    choices = {"goals": (goals, GOALS), "features": (features, FEATURES), "lean": (lean, LEANS)}
    for name, (value, known) in (choices | {"output": (output, OUTPUTS), "start": (start, STARTS)}).items():
        require_choice(name, value, known)
    if min(refine, polish) < 0:
        raise RequestError(f"reconstruct: refine is {refine} and polish {polish}; both are numbers of steps from 0.")
    if not temperature > 0:
        raise RequestError(f"reconstruct: temperature is {temperature}; it is a number above 0.", keys=("temperature",))
