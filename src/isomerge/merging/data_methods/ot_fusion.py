"""Fusing by optimal transport: every model is carried to the units of the first, and the carried models are averaged.

With equal widths, the solver "emd", uniform masses and a stream that is not averaged, every plan is a permutation and a
carried model computes what it did; otherwise it is an approximation, and the report says so. Weights of 0 and 1 give
the second model alone, carried to the units of the first.

Reference: Imfeld et al., "Transformer Fusion with Optimal Transport" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isomerge.alignment.compatibility import require_one_stream
from isomerge.architectures import describe
from isomerge.arguments import require_choice
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.parents import read_parents
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, each
from isomerge.merging.transport.barycentres import barycentres
from isomerge.merging.transport.carry import carry, distance, finished, own_state, plan_of
from isomerge.merging.transport.pair_plans import TransportRequest
from isomerge.merging.transport.solver import TransportSolver

TOWARDS = ("first", "barycentre")


@data_method(data="optional", passes="every model, once", reference="https://arxiv.org/abs/2310.05719", any_width=True)
def ot_fusion(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    cost: str | None = None,
    solver: str = "emd",
    regularisation: float = 0.05,
    mass: str = "uniform",
    inner: float = 1.0,
    towards: str = "first",
    residual: str = "joint",
    heads: str = "matched",
    site: str = "post",
    only: str | None = None,
) -> MergedWeights:
    """Carry the units of every model to those of the first that they are nearest to, and average.

    Options:
        weight: how much of each model, divided by their sum
        cost: what units are compared by, activations or weights; null for activations where there is data
        solver: emd (each unit to one other, where the widths are equal), sinkhorn (to several) or gromov (to those that are placed alike within their own model)
        regularisation: how soft the plans of sinkhorn are, as a share of the mean cost
        mass: uniform, or importance (a unit weighs as much as it does)
        inner: of gromov, how much distances within each model count beside those across; 1 for them alone
        towards: first (its units) or, with gromov, barycentre (the geometry nearest to those of all models)
        residual: how the writers of the stream agree: joint, averaging, weighted, weighted_units, first or identity
        heads: matched, fixed (in their order) or across (units regardless of heads)
        site: whether feed-forward units are seen after (post) or before (pre) their activation function
        only: ffn, attention or residual; null for all
    """  # noqa: E501
    batches = inputs.data[0].passes(inputs.models[0]) if inputs.data else None
    require_choice("towards", towards, TOWARDS)
    how = TransportSolver(solver, regularisation, mass, inner)
    request = TransportRequest(how, cost, residual, heads, only, site, batches, inputs.device, inputs.progress)
    return _fused(inputs, inputs.shares(weight), request, towards)


def _fused(inputs: MergeInputs, shares: list[float], request: TransportRequest, towards: str) -> MergedWeights:
    """Σ share · (model in the units of the first, or of the barycentre)."""
    given = inputs.models
    models, config, notes, alignment = _in_one_basis(inputs)
    anchor = replace(describe(models[0]), device=request.device)
    require_one_stream(anchor.architecture, "ot_fusion", "Align the models, and average them.")
    plan = plan_of(anchor)
    own = own_state(anchor.checkpoint, plan)
    home, first = own, None
    if towards == "barycentre":
        every = [anchor, *(replace(describe(model), device=request.device) for model in models[1:])]
        request = replace(request, targets=barycentres(every, shares, request))
        moved, first = carry(models[0], anchor, request)
        home = {**own, **moved}
    total = {name: shares[0] * tensor if tensor.is_floating_point() else tensor for name, tensor in home.items()}
    sources: list[dict[str, Any]] = []
    carried_notes: list[str] = first.pop("notes") if first else []
    for source, original, share in zip(models[1:], given[1:], shares[1:], strict=True):
        moved, record = carry(source, anchor, request)
        for name in (n for n in plan if own[n].is_floating_point()):
            total[name] += share * moved.get(name, home[name])
        far = {"before": distance(own_state(original, original.tensors), own_state(given[0], given[0].tensors))}
        if source is not original:
            far["aligned"] = distance(own_state(source, source.tensors), own)
        carried_notes += record.pop("notes")
        sources.append({**record, "distance": {**far, "after": distance(moved, home)}})
    record = {
        "examples": max((one["examples"] for one in sources), default=0), "weights": shares,
        "exact": all(one["exact"] for one in (first, *sources) if one), "towards": towards, "sources": sources,
    }  # fmt: skip
    notes = list(dict.fromkeys([*anchor.architecture.notes, *anchor.notes, *notes, *carried_notes]))
    changes = {k: v for k, v in config.items() if k not in given[0].config or given[0].config[k] != v}
    return MergedWeights(finished(total, anchor), plan, changes, alignment, notes, record)


def _in_one_basis(inputs: MergeInputs) -> tuple[list[Checkpoint], Mapping[str, Any], list[str], dict[str, Any] | None]:
    """The models that are carried, their config, notes and the record of the alignment, where there is one. Aligned
    models are not rounded before they are carried."""
    if inputs.align is None:
        return list(inputs.models), inputs.models[0].config, [], None
    parents, states = read_parents(inputs)
    models = [MemoryCheckpoint(c.name, state, parents.config) for c, state in zip(inputs.models, states, strict=True)]
    return [*models], parents.config, list(parents.notes), parents.alignment
