"""Fusing by optimal transport: the recipe's form of `isomerge.merging.transport`."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each
from isomerge.merging.whole.method import Solved, Work, whole_method


@whole_method(data="optional", passes="every model, once", reference="https://arxiv.org/abs/2310.05719", any_width=True)
def ot_fusion(
    work: Work,
    *,
    weight: PerModel[float] = each(1.0),
    cost: str | None = None,
    solver: str = "emd",
    regularisation: float = 0.05,
    mass: str = "uniform",
    residual: str = "joint",
    heads: str = "matched",
    only: str | None = None,
) -> Solved:
    """Carry the units of every model to those of the first that they are nearest to, and average.

    Options:
        weight: how much of each model, divided by their sum
        cost: what units are compared by, activations or weights; null for activations where there is data
        solver: emd (each unit to one other, where the widths are equal) or sinkhorn (to several)
        regularisation: how soft the plans of sinkhorn are, as a share of the mean cost
        mass: uniform, or importance (a unit weighs as much as it does)
        residual: how the writers of the stream agree: joint, averaging, weighted, weighted_units, first or identity
        heads: matched, fixed (in their order) or across (units regardless of heads)
        only: ffn, attention or residual; null for all
    """
    from isomerge.merging.transport import fuse

    batches = work.data[0].passes(work.models[0]) if work.data else None
    align = False if work.align is None else work.align
    found = fuse(
        work.models, batches, weights=weight, cost=cost, solver=solver, regularisation=regularisation, mass=mass,
        residual=residual, heads=heads, only=only, align=align, device=work.device, progress=work.progress,
    )  # fmt: skip
    record = found.report()
    told = {key: record[key] for key in ("examples", "weights", "exact", "sources")}
    return Solved(found.tensors, found.plan, found.config_changes, record["aligned"], record["notes"], told)
