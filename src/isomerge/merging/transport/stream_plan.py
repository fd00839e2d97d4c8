"""The residual stream has many writers, and each finds its own plan. The policy says how they become one.

| policy | the plan of the stream |
|---|---|
| joint | one solve on the evidence of all writers, each counting the same; with a hard solver it is a permutation |
| averaging | the mean of the writers' plans |
| weighted | their mean, each weighted by the size of what it writes |
| weighted_units | the same, unit by unit of the anchor |
| first | that of the embeddings, where the stream starts |
| identity | the stream keeps its units |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isomerge.merging.transport.evidence import UnitDistances
from isomerge.merging.transport.plans import writing
from isomerge.merging.transport.solver import TransportSolver

POLICIES = ("joint", "averaging", "weighted", "weighted_units", "first", "identity")


def stream_plan(policy: str, evidence: Sequence[UnitDistances], solver: TransportSolver) -> Tensor:
    """The plan of the stream; the first piece of evidence is where it starts."""
    seen = [e.normalised() for e in evidence]
    if policy in ("joint", "first"):
        used = seen if policy == "joint" else seen[:1]
        cost, energy_a, energy_b = (
            sum(parts[1:], parts[0])
            for parts in ([e.cost for e in used], [e.energy_a for e in used], [e.energy_b for e in used])
        )
        return solver.plan(cost, energy_a, energy_b)
    plans = torch.stack([solver.plan(e.cost, e.energy_a, e.energy_b) for e in seen])
    shares = torch.ones(len(plans), plans.shape[1], dtype=torch.float64)
    if policy == "weighted":
        shares *= torch.tensor([e.size for e in evidence], dtype=torch.float64)[:, None]
    elif policy == "weighted_units":
        shares = torch.stack([e.energy_a for e in evidence]).double().clamp(min=0).sqrt() + 1e-12
    return (plans * (shares / shares.sum(0))[..., None]).sum(0)


def softness(plan: Tensor) -> float:
    """How many units of the source an anchor's unit is made of, on average, less one: 0 for a permutation."""
    rows = writing(plan)
    return float((1 / rows.square().sum(1).clamp(min=1e-300)).mean()) - 1
