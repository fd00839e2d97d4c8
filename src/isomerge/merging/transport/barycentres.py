"""Gromov–Wasserstein barycentres: the geometry of units nearest to those of all models, to which all are carried.

    D = argmin Σ_k s_k GW(D, D_k)

with D_k the distances between the units of model k and s_k its share. No model is the one that all others follow; the
number of units n is that of the first. Plans and D are found in turns, from the D of the first model:

    D ← n² Σ_k s_k P_k D_k P_kᵀ

References: Peyré, Cuturi and Solomon, "Gromov-Wasserstein Averaging of Kernel and Distance Matrices" (ICML 2016);
Akash et al., "Wasserstein Barycenter-based Model Fusion and Linear Mode Connectivity of Neural Networks" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.transport.pair_plans import PairPlanner, TransportRequest, moving_of, require_transportable
from isomerge.merging.transport.plans import TransportPlans
from isomerge.merging.transport.solver import TransportSolver, geometry
from isomerge.merging.transport.unit_plans import flat_within
from isomerge.symmetry.binding import BoundModel

TURNS = 20


def barycentres(
    models: Sequence[BoundModel], shares: Sequence[float], request: TransportRequest
) -> Mapping[str, Tensor]:
    """Squared distances within the barycentre, for the stream and every space of units that has none inside it."""
    if not (request.solver.looks_inside and request.solver.inner == 1) or request.residual not in ("joint", "identity"):
        raise RequestError(
            "Transporting units to a barycentre: it is a geometry, and has no units to compare with those of a model. "
            "Use the solver 'gromov' with inner=1, and residual='joint' or 'identity'.",
            keys=("towards",),
        )
    for source in models[1:]:
        require_transportable(source, models[0], moving_of(models[0], request))
    own = [_geometries(model, request) for model in models]
    solver = replace(request.solver, mass="uniform")
    return {space: _barycentre([each[space] for each in own], shares, solver).square() for space in own[0]}


def _barycentre(distances: Sequence[Tensor], shares: Sequence[float], solver: TransportSolver) -> Tensor:
    centre = distances[0]
    for _ in range(TURNS):
        before, centre = centre, torch.zeros_like(centre)
        for share, one in zip(shares, distances, strict=True):
            even = torch.ones(len(before), len(one), dtype=torch.float64)
            plan = solver.plan(even, even.sum(1), even.sum(0), (before.square(), one.square()))
            centre += share * len(before) ** 2 * (plan @ one @ plan.T)
        if bool(torch.allclose(before, centre, rtol=0, atol=1e-9)):
            break
    return centre


def _geometries(model: BoundModel, request: TransportRequest) -> dict[str, Tensor]:
    """Distances of mean 1 within one model."""
    planner = PairPlanner(model, model, request, TransportPlans(moving_of(model, request)))
    found = {}
    for space, evidence in planner.evidence().items():
        if all(e.spaces == (space,) for e in evidence) and (within := flat_within(evidence)) is not None:
            found[space] = geometry(within[0])
    return found
