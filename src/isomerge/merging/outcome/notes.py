"""Notes on a result: models that were trained apart, and precision that is lost without being asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import TensorInfo, main_dtype, name_some
from isomerge.kinship import Relation, Rows, are_related, cosines, in_few_layers, place_of, relation
from isomerge.merging.plan.tensor_plan import RecipePlan, TensorInput, TensorPlan
from isomerge.merging.recipe import ModelReference

if TYPE_CHECKING:
    from isomerge.merging.outcome.merged import Merged


Strangers = dict[str, dict[str, float]]
"""Of a model, those that have nothing in common with it, with their cosines."""


def strangers_among(plan: RecipePlan, models: Mapping[ModelReference, Checkpoint]) -> Strangers:
    """The models that meet strangers in a merge.

    Three layers are looked at, some rows of each matrix. Vocabulary tables say more of tokens than of kinship, and
    where different layers meet (in stacks) nothing can be said.
    """
    meeting = {name: inputs for name, one in plan.tensors.items() if len(inputs := _meeting(one, models)) > 1}
    groups: dict[tuple[str, ...], list[Relation]] = {}  # apart, as a cosine is over tensors that both models have there
    for name in in_few_layers(meeting):
        rows: dict[str, Rows] = {
            str(one.model): partial(models[one.model].read_rows, one.tensor) for one in meeting[name]
        }
        first = meeting[name][0]
        shape = models[first.model].tensors[first.tensor].shape
        groups.setdefault(tuple(rows), []).append(relation(name, shape, None, rows, reference=None))
    strangers: Strangers = {}
    for (reference, *_), relations in groups.items():
        for (one, other), cosine in cosines(relations, "after").items():
            if one == reference and not are_related(cosine):
                strangers.setdefault(one, {})[other] = round(cosine, 2) + 0.0
    return strangers


def name_strangers(strangers: Strangers) -> list[str]:
    """A note for each model that has strangers among those it is merged with."""
    notes = []
    for reference, cosines_of in strangers.items():
        others = " and ".join(f"{other} (cosine {cosine:.2f})" for other, cosine in cosines_of.items())
        notes.append(
            f"{others} {'has' if len(cosines_of) == 1 else 'have'} nothing in common with the layers of {reference}, "
            "where siblings have a cosine near 1. Merged as they are, such models hardly work: align them at level "
            "full (`align`). See isomerge check"
        )
    return notes


def _meeting(plan: TensorPlan, models: Mapping[ModelReference, Checkpoint]) -> list[TensorInput]:
    """The inputs of a matrix that count, the base first, one for each model; none where matrices differ in place."""
    weights = plan.options.get("weight")
    zero = [isinstance(weights, (list, tuple)) and weights[place] == 0 for place in range(len(plan.inputs))]
    counted = [given for given, left_out in zip(plan.inputs, zero, strict=True) if not left_out]
    every = [given for given in (plan.base, *counted) if given is not None and given.model in models]
    infos = [models[given.model].tensors[given.tensor] for given in every]
    if len({place_of(given.tensor)[1:] for given in every}) != 1 or len({info.shape for info in infos}) != 1:
        return []
    if len(infos[0].shape) < 2 or not all(info.dtype.is_floating_point for info in infos):
        return []
    return list({given.model: given for given in every}.values())


def name_narrowed(merged: Merged) -> list[str]:
    """The models that lose by the dtype of another, as a note or none."""
    if merged.recipe.asked_dtype:
        return []
    written = _precision(job.info for job in merged.jobs)
    # Of the last recipe, what it merges: a base may give its config alone, and another document has a dtype of its own.
    plans = merged.tensor_plans.tensors.values()
    merging = {str(given.model) for plan in plans for given in plan.every}
    stored = {name: _precision(merged.inputs[name].tensors.values()) for name in merged.models if name in merging}
    finer = [name for name, dtype in stored.items() if dtype.itemsize > written.itemsize]
    if not finer:
        return []
    most = max((stored[name] for name in finer), key=lambda dtype: dtype.itemsize)
    return [
        f"the result is stored in {_word(written)}, as the base or the first model is, and {name_some(finer)} in "
        f"{_word(most)}: `out_dtype` {_word(most)} keeps that precision"
    ]


def _precision(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Of the weights, as most of them have it."""
    return main_dtype(info for info in infos if info.dtype.is_floating_point) or torch.float32


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
