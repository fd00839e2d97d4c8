"""The parents in one basis, and their weighted mean: as states under the names of the first model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.errors import RequestError
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel

State = dict[str, Tensor]


@dataclass(frozen=True)
class Parents:
    """What they have in common."""

    plan: dict[str, TensorInfo]
    bound: BoundModel
    config: dict[str, Any]
    notes: list[str]
    alignment: dict[str, Any] | None
    precision: torch.dtype


def prepare(
    models: Sequence[Checkpoint], align: bool | Mapping[str, Any], device: str, progress: Any
) -> tuple[Parents, list[State]]:
    """Align every model to the first, or take them as they are. Nothing that was moved is rounded."""
    from isomerge.architectures import describe

    first = models[0]
    wide = any(info.dtype == torch.float64 for model in models for info in model.tensors.values())
    precision = torch.float64 if wide else torch.float32
    aligned = None
    if align is not False and len(models) > 1:
        from isomerge.merge.aligned import align_models

        options = dict(align) if isinstance(align, Mapping) else {}
        aligned = align_models(models, first, **{"device": device, "progress": progress, **options})
    if aligned is None:
        _require_same_tensors(models)
        states = [{name: model.read(name) for name in first.tensors} for model in models]
        return Parents(dict(first.tensors), describe(first), dict(first.config), [], None, precision), states
    plan = aligned.plan()
    states = []
    for model in models:
        sources = {file: aligned.source(model, file) for file in plan}
        state = {}
        for file, source in sources.items():
            rows = source.info.shape[0] if source.info.shape else 1
            state[file] = source.rows(0, rows).clone().cpu()
            if hasattr(source, "release"):
                source.release()
        states.append(state)
    config = {**first.config, **aligned.config_changes}
    return Parents(plan, aligned.own.model, config, aligned.notes, aligned.record, precision), states


def canonical(parents: Parents, states: Sequence[State]) -> tuple[Parents, list[State]]:
    """The same models with every norm folded into its readers and nothing tied to anything, so that the stream may be
    written in any basis. Their functions do not change."""
    from isomerge.align.move import Move
    from isomerge.architectures import describe
    from isomerge.checkpoint.memory import MemoryCheckpoint
    from isomerge.symmetry.canonical import Canonical
    from isomerge.symmetry.transform import Transform

    found: list[State] = []
    for state in reversed(states):  # the first comes last: its names are the ones to keep
        bound = describe(MemoryCheckpoint("the aligned model", dict(state), parents.config), untie=True)
        move = Move(bound, Transform(bound.architecture.spaces), Canonical(bound, [RESIDUAL]), None)
        moved: State = {}
        for name in bound.layouts:
            moved |= bound.split(name, move.tensor(name))
        plan = move.plan(None)
        found.insert(0, {file: moved[file] if file in moved else state[file] for file in plan})
    dtypes = {file: parents.plan[file].dtype for file in plan if file in parents.plan}
    tables = {name: source for name, (source, _) in bound.architecture.tied.items()}
    own = {
        file: TensorInfo(info.shape, dtypes.get(file) or dtypes[bound.files[tables[file]][0]])
        for file, info in plan.items()
    }
    notes = list(parents.notes)
    if bound.architecture.untied_config:
        notes.append("input and output table were tied and are now separate, since the stream has a basis of its own")
    config = {**parents.config, **bound.architecture.untied_config}
    return Parents(own, bound, config, notes, parents.alignment, parents.precision), found


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
        raise RequestError(f"Reconstructing from {len(models)} models: {shown}. Use models of one architecture.")
