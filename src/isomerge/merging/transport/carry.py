"""One source in the units of the anchor: its tensors, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, TensorInfo, is_buffer
from isomerge.kinship import counted, relative_distance
from isomerge.merging.transport.pair_plans import SolvedPlans, TransportRequest, solve_plans
from isomerge.merging.transport.plans import softness
from isomerge.symmetry.binding import BoundModel

State = dict[str, Tensor]


def carry(source: Checkpoint, anchor: BoundModel, request: TransportRequest) -> tuple[State, dict[str, Any]]:
    """The source in the anchor's units, in float64 and by the anchor's names on disk; and a record of how."""
    bound = replace(describe(source), device=request.device)
    request = replace(request, solver=replace(request.solver, unfinished=0))
    solved = solve_plans(bound, anchor, request)
    moved: State = {}
    for name in anchor.files:
        carried = solved.plans.move(bound.raw(name), bound.layouts[name], anchor.layouts[name])
        moved |= {file: part.cpu() for file, part in anchor.split(name, carried).items()}
    for name in anchor.extra:
        info = source.tensors.get(name)
        if info is not None and info.shape == anchor.checkpoint.tensors[name].shape and not is_buffer(source, name):
            moved[name] = source.read(name).double()
    return moved, _record(bound, solved)


def _record(source: BoundModel, solved: SolvedPlans) -> dict[str, Any]:
    spaces: dict[str, dict[str, Any]] = {}
    for space, plan in solved.plans.all():
        row = spaces.setdefault(space, {"name": space, "units": list(reversed(plan.shape)), "softness": []})
        row["softness"].append(softness(plan))
    rows = [{**row, "softness": sum(row["softness"]) / len(row["softness"])} for row in spaces.values()]
    notes = [*source.architecture.notes, *source.notes, *solved.notes]
    if not solved.plans.exact:
        notes.append(
            f"{source.name} was carried approximately: its plans are not permutations, so its function changes"
        )
    return {
        "model": source.name, "exact": solved.plans.exact, "examples": solved.examples, "spaces": rows, "notes": notes,
    }  # fmt: skip


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float | None:
    """Of `first` from `second`, as `isomerge.kinship` defines it; None where a shape differs."""
    shared = [name for name in sorted(set(first) & set(second)) if first[name].is_floating_point()]
    if any(first[name].shape != second[name].shape for name in shared):
        return None
    apart = size = 0.0
    for name in counted({name: first[name].ndim for name in shared}):
        a, b = first[name], second[name]
        apart += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return relative_distance(apart, size)


def plan_of(anchor: BoundModel) -> dict[str, TensorInfo]:
    """Everything the anchor stores, but for copies of tied tables that no model reads."""
    return {name: info for name, info in anchor.checkpoint.tensors.items() if name not in anchor.stale}


def own_state(checkpoint: Checkpoint, names: Mapping[str, Any]) -> State:
    """Tensors in float64; what has no fraction stays."""
    tensors = {name: checkpoint.read(name) for name in names}
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def finished(state: State, anchor: BoundModel) -> State:
    """In the precision the weights are stored in; buffers are the anchor's own."""
    result = {}
    for name, tensor in state.items():
        if name in anchor.extra and is_buffer(anchor.checkpoint, name):
            result[name] = anchor.checkpoint.read(name)
        else:
            result[name] = tensor.to(anchor.stored_precision) if tensor.is_floating_point() else tensor
    return result
