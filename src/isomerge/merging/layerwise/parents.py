"""The parents in one basis, and their weighted mean: as states under the names of the first model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.kinship import cosines, counted, in_few_layers, relation
from isomerge.merging.layerwise.parent_views import ParentView, State
from isomerge.merging.layerwise.token_matching import TokenMatch
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.stock import read_weights
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.transform import Transform


@dataclass(frozen=True)
class ParentModels:
    """What they have in common, which is what the merged model has; and what is each one's own."""

    plan: dict[str, TensorInfo]
    bound: BoundModel
    config: dict[str, Any]
    notes: list[str]
    alignment: dict[str, Any] | None
    precision: torch.dtype
    count: int
    views: tuple[ParentView, ...] = ()
    configs: tuple[dict[str, Any], ...] = ()
    """Where one of them, or the merged model, is of another shape."""
    room: dict[str, Any] = field(default_factory=dict)
    """Sizes of the first model and of a wider merged one, for the report."""
    matched: list[dict[str, Any]] = field(default_factory=list)
    """Layers of parents of another depth: for each of the merged model, those of the parent."""


def read_parents(inputs: MergeInputs, *, align: bool = True) -> tuple[ParentModels, list[State]]:
    """Every model next to the first, where that is asked for, or as it is. Nothing that was moved is rounded."""
    models, first = inputs.models, inputs.models[0]
    wide = any(info.dtype == torch.float64 for model in models for info in model.tensors.values())
    precision = torch.float64 if wide else torch.float32
    aligned = inputs.aligned() if align else None
    if aligned is None:
        _require_same_tensors(models)
        states = [read_weights(model) for model in models]
        return ParentModels(
            dict(first.tensors), describe(first), dict(first.config), [], None, precision, len(models)
        ), states
    plan = aligned.plan
    states = [{file: tensor.clone() for file, tensor in aligned.tensors(model)} for model in models]
    config = {**first.config, **aligned.config_changes}
    parents = ParentModels(plan, aligned.own.model, config, aligned.notes, aligned.record, precision, len(models))
    return _separated(parents, states)


def _separated(parents: ParentModels, states: Sequence[State]) -> tuple[ParentModels, list[State]]:
    """Aligned models have an output table of their own, whether the alignment needed it or not: then it is solved too,
    and what comes out does not depend on the basis a model came in."""
    apart = [describe(in_memory(state, parents.config), untie=True) for state in states]
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
    bounds, folded = zip(*(_folded(state, parents.config) for state in states), strict=True)
    notes = list(parents.notes)
    if bounds[0].architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream has a basis of its own")
    return _apart(parents, bounds[0], notes), list(folded)


def _folded(state: State, config: Mapping[str, Any]) -> tuple[BoundModel, State]:
    bound = describe(in_memory(state, config), untie=True)
    move = MovedModel(bound, Transform(bound.architecture.spaces), Canonical(bound, [RESIDUAL]), None)
    moved: State = {}
    for name in bound.layouts:
        moved |= bound.split(name, move.tensor(name))
    return bound, moved | {name: state[name] for name in bound.extra}


def least_cosine(models: Sequence[Checkpoint]) -> float:
    """Of any two models, as far as some rows of three layers say."""
    shapes = [{name: info.shape for name, info in model.tensors.items()} for model in models]
    if any(one != shapes[0] for one in shapes):
        return -1.0
    names = in_few_layers(counted({name: len(shape) for name, shape in shapes[0].items()}))
    relations = [
        relation(
            name, shapes[0][name], None, {str(m): partial(model.read_rows, name) for m, model in enumerate(models)},
            reference=None,
        )
        for name in names
    ]  # fmt: skip
    return min(cosines(relations, "after").values(), default=1.0)


def of_other_shapes(models: Sequence[Checkpoint]) -> bool:
    """Whether models have tensors of other names or shapes than the first."""
    shapes = [{name: info.shape for name, info in model.tensors.items()} for model in models]
    return any(one != shapes[0] for one in shapes)


def read_apart(inputs: MergeInputs, matches: Mapping[int, TokenMatch]) -> tuple[ParentModels, list[State]]:
    """Models of several shapes or vocabularies, each as with `with_norms_folded`; the merged model is of the shape and
    the vocabulary of the first. `matches`: the models of other vocabularies, by place."""
    models, first = inputs.models, inputs.models[0]
    wide = any(info.dtype == torch.float64 for model in models for info in model.tensors.values())
    found = [_folded(read_weights(model), model.config) for model in models]
    bounds, states = [bound for bound, _ in found], [state for _, state in found]
    what = "shapes" if of_other_shapes(models) else "vocabularies"
    notes = [f"the models were not aligned: they are of different {what}, and joint features need no common basis"]
    parents = ParentModels(
        dict(first.tensors), bounds[0], dict(first.config), notes if inputs.align is not None else [], None,
        torch.float64 if wide else torch.float32, len(models),
    )  # fmt: skip
    parents = _apart(parents, bounds[0], parents.notes)
    configs = tuple({**m.config, **b.architecture.untied_config} for m, b in zip(models, bounds, strict=True))
    views = tuple(ParentView(bound, tokens=matches.get(m)) for m, bound in enumerate(bounds))
    return replace(parents, views=views, configs=configs), states


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


def in_memory(state: State, config: Mapping[str, Any]) -> Checkpoint:
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
        raise RequestError(
            f"Merging {len(models)} models: {shown}. Models of different shapes are merged by reconstruct with joint "
            "features."
        )
