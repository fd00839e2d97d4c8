"""The parents in one basis, and their weighted mean: as states under the names of the first model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.stock import read_weights
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.transform import Transform

State = dict[str, Tensor]


@dataclass(frozen=True)
class ParentModels:
    """What they have in common."""

    plan: dict[str, TensorInfo]
    bound: BoundModel
    config: dict[str, Any]
    notes: list[str]
    alignment: dict[str, Any] | None
    precision: torch.dtype


def read_parents(inputs: MergeInputs, *, align: bool = True) -> tuple[ParentModels, list[State]]:
    """Every model next to the first, where that is asked for, or as it is. Nothing that was moved is rounded."""
    models, first = inputs.models, inputs.models[0]
    wide = any(info.dtype == torch.float64 for model in models for info in model.tensors.values())
    precision = torch.float64 if wide else torch.float32
    aligned = inputs.aligned() if align else None
    if aligned is None:
        _require_same_tensors(models)
        states = [read_weights(model) for model in models]
        return ParentModels(dict(first.tensors), describe(first), dict(first.config), [], None, precision), states
    plan = aligned.plan
    states = [{file: tensor.clone() for file, tensor in aligned.tensors(model)} for model in models]
    config = {**first.config, **aligned.config_changes}
    parents = ParentModels(plan, aligned.own.model, config, aligned.notes, aligned.record, precision)
    return _separated(parents, states)


def _separated(parents: ParentModels, states: Sequence[State]) -> tuple[ParentModels, list[State]]:
    """Aligned models have an output table of their own, whether the alignment needed it or not: then it is solved too,
    and what comes out does not depend on the basis a model came in."""
    apart = [describe(_in_memory(state, parents.config), untie=True) for state in states]
    if not apart[0].architecture.untied_config:
        return parents, list(states)
    new = [name for name in apart[0].layouts if name not in apart[0].files]
    states = [
        state | {name: bound.raw(name, bound.stored_precision) for name in new}
        for state, bound in zip(states, apart, strict=True)
    ]
    notes = [
        *parents.notes,
        "input and output table were tied and are now separate: each is merged by itself",
    ]
    return _apart(parents, apart[0], notes), states


def with_norms_folded(parents: ParentModels, states: Sequence[State]) -> tuple[ParentModels, list[State]]:
    """The same models with every norm folded into its readers and nothing tied to anything, so that the stream may be
    written in any basis. Their functions do not change."""
    bounds, folded = [], []
    for state in states:
        bound = describe(_in_memory(state, parents.config), untie=True)
        move = MovedModel(bound, Transform(bound.architecture.spaces), Canonical(bound, [RESIDUAL]), None)
        moved: State = {}
        for name in bound.layouts:
            moved |= bound.split(name, move.tensor(name))
        folded.append(moved | {name: state[name] for name in bound.extra})
        bounds.append(bound)
    notes = list(parents.notes)
    if bounds[0].architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream has a basis of its own")
    return _apart(parents, bounds[0], notes), folded


def _apart(parents: ParentModels, bound: BoundModel, notes: list[str]) -> ParentModels:
    """What the models have in common once nothing is tied: a new table is stored as the one it was tied to."""
    plan = dict(parents.plan)
    for name, layout in bound.layouts.items():
        if name not in bound.files:
            source = bound.files[bound.architecture.tied[name][0]][0]
            plan[name] = TensorInfo(tuple(layout.shape), plan[source].dtype)
    for name in bound.stale:
        plan.pop(name, None)
    config = {**parents.config, **bound.architecture.untied_config}
    return replace(parents, plan=plan, bound=bound, config=config, notes=notes)


def with_fixed_stream(parents: ParentModels) -> ParentModels:
    """The same, with a stream that stays in the basis it has."""
    bound = parents.bound
    return replace(parents, bound=replace(bound, architecture=bound.architecture.frozen([RESIDUAL])))


def _in_memory(state: State, config: Mapping[str, Any]) -> Checkpoint:
    return MemoryCheckpoint("the aligned model", dict(state), dict(config))


def _require_same_tensors(models: Sequence[Checkpoint]) -> None:
    first, problems = models[0], []
    for model in models[1:]:
        for name, info in first.tensors.items():
            other = model.tensors.get(name)
            if other is None:
                problems.append(f"{model.name} has no '{name}'")
            elif other.shape != info.shape:
                problems.append(f"'{name}' is {other.shape} in {model.name} and {info.shape} in {first.name}")
        problems += [f"{first.name} has no '{name}'" for name in model.tensors if name not in first.tensors]
    if problems:
        shown = "; ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise RequestError(f"Merging {len(models)} models: {shown}. WeightCall models of one architecture.")
