"""A fine-tune carried to another base: one that was trained anew, from another seed, or further.

    W = W_new + scale · (g(base + τ) − g(base)),   g: base → new base by their symmetry

and, with data, fitted to it (`correction`). The base of a recipe is the new base; the models are the fine-tune and the
base it was made from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from isomerge.arguments import require_choice
from isomerge.checkpoint import Checkpoint
from isomerge.choices import CORRECTIONS, LEVELS
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.rebasing.arrival import BASE, NAIVE, ONTO, OUT, Arrival, Examples
from isomerge.merging.rebasing.features import fitted_to_features
from isomerge.merging.rebasing.gradient_signs import agreeing, prediction_gradients
from isomerge.merging.rebasing.mapped_features import fitted_to_another_shape
from isomerge.merging.rebasing.moved_change import (
    Mask,
    MovedChange,
    in_memory,
    moved_change,
    require_fitting,
    unmoved,
    when_unmeasured,
)
from isomerge.running.passes import DataPass


@data_method(
    data="optional",
    passes="the three models, once per linear map, as far as the map",
    least=2,
    most=2,
    base="required",
    any_architecture=True,
    reference="https://arxiv.org/abs/2510.09658",
)
def rebase(
    inputs: MergeInputs,
    *,
    scale: float = 1.0,
    correction: str = "auto",
    level: str = "full",
    ridge: float | None = None,
    cache: str = "2GB",
) -> MergedWeights:
    """Carry a fine-tune (the first model) from its base (the second) to the new base.

    Options:
        scale: how much of the change is added
        correction: how the change is fitted to the new base on data: features solves every linear map so that its features change as the old base's did; signs keeps what goes down the gradient towards the fine-tune's predictions; none adds the moved change as it is. auto is features with data, and none without data or where the new base is a sibling of the old one
        level: how much may move when the old base is aligned to the new one: permutation, rotation or full
        ridge: how strongly features hold the weights at the moved change, as a share of what each input varies. If not named, every regression takes what predicts held-out inputs best, from 0.001 to 1
        cache: memory that spares running finished layers again, as 2GB; 0 switches it off
    """  # noqa: E501
    correction = _checked(inputs, correction, level, ridge)
    tuned, base = inputs.models
    onto = inputs.base
    assert onto is not None
    other = require_fitting(tuned, base, onto)
    examples = Examples.of(inputs.data[0], onto) if inputs.data else None
    about: dict[str, Any] = {"scale": scale, "correction": correction, "other_shape": other}
    if other:
        _require_features(correction if inputs.data else "none", onto)
        change = None
    else:
        change = moved_change(inputs, level)
        about["siblings"] = change.siblings
    if examples is None:
        assert change is not None
        return _result(change, change.added(scale), {"rebased": about}, when_unmeasured(change))
    arrival = Arrival(examples, tuned, inputs.device)
    for name, model in ((BASE, base), (ONTO, onto), (NAIVE, unmoved(change, scale) if change else None)):
        if model is not None:
            arrival.add(name, model)
    if correction == "auto":
        correction = "none" if change is not None and change.siblings else "features"
        about["correction"] = correction
    if change is None:
        found = fitted_to_another_shape(inputs, examples.fitted, scale, ridge, cache)
    elif correction == "features":
        found = fitted_to_features(inputs, change, examples.fitted, scale, ridge, cache)
    else:
        mask = _mask(inputs, change, examples) if correction == "signs" else None
        found = _result(change, change.added(scale, mask), {}, [])
    arrival.add(OUT, in_memory(onto, found))
    about |= arrival.record()
    return replace(
        found, notes=[*_told(about), *examples.note, *found.notes],
        record={**found.record, "examples": inputs.data[0].examples, "rebased": about},
    )  # fmt: skip


def _mask(inputs: MergeInputs, change: MovedChange, examples: Examples) -> Mask:
    data = DataPass(examples.fitted, device=inputs.device, labels=False, hashed=False)
    return agreeing(prediction_gradients(change, data, inputs.device))


def _result(change: MovedChange, tensors: Any, record: dict[str, Any], notes: list[str]) -> MergedWeights:
    aligned = change.aligned
    return MergedWeights(
        tensors, aligned.plan, aligned.config_changes, aligned.record, [*notes, *aligned.notes], record
    )


# --- what is said of it -----------------------------------------------------------------------------------------------
def _told(about: dict[str, Any]) -> list[str]:
    found = about["shares"]
    told = [f"{100 * share:.0f} % by {measure}" for measure, share in found.items() if share is not None]
    if not told:
        return ["the fine-tune is no better than its base on this data, so there is no gain whose share could be told"]
    what = "of the distance to the fine-tune's predictions is gone" if "distance" in found else (
        "of the fine-tune's gain has arrived"
    )  # fmt: skip
    return [f"{' and '.join(told)} {what}, on examples kept aside" if about["new_examples"] else f"{told[0]} {what}"]


# --- what does not go together ----------------------------------------------------------------------------------------
def _checked(inputs: MergeInputs, correction: str, level: str, ridge: float | None) -> str:
    require_choice("correction", correction, CORRECTIONS)
    require_choice("level", level, LEVELS)
    if ridge is not None and not 0 < ridge < math.inf:
        raise RequestError(f"rebase: ridge is {ridge}; it is a number above 0.", keys=("ridge",))
    if correction == "auto" and not inputs.data:
        correction = "none"
    if correction not in ("auto", "none") and not inputs.data:
        raise RequestError(
            f"rebase: correction {correction} looks at data, and there is none. Give data, or leave correction out.",
            keys=("data", "correction"),
        )
    if ridge is not None and correction not in ("auto", "features"):
        raise RequestError(
            f"rebase: ridge is of the regressions of correction features, and correction is {correction}. "
            "Leave it out.",
            keys=("ridge", "correction"),
        )
    return correction


def _require_features(correction: str, onto: Checkpoint) -> None:
    if correction not in ("auto", "features"):
        raise RequestError(
            f"Carrying a fine-tune to {onto.name}, which is of another shape: that takes maps between activations, so "
            "it needs data and correction features. Give data, or name a new base of the same shape.",
            keys=("data", "correction", "onto"),
        )
