"""Orders by Sinkhorn's soft assignment, made hard: rows and columns are scaled in turn, ever less softly."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.alignment.solvers.assignment import assign

TEMPERATURES = tuple(2.0**-power for power in range(9))  # of the scores' deviation
ROUNDS = 20  # of scaling, at each temperature


def sinkhorn_orders(scores: Tensor) -> Tensor:
    """Nearly the permutations that maximise `Σ_j scores[perm[j], j]`: (pairs, n, n) → (pairs, n).

    The soft assignment P = exp((scores + u 1ᵀ + 1 vᵀ) / T) has rows and columns that add up to 1, and maximises
    `⟨P, scores⟩ + T · entropy(P)`. u and v are found by scaling rows and columns in turn, in logarithms, while T falls
    from the deviation of the scores to 1/256 of it. Then units that are each other's best partners in P are matched,
    and the rest is assigned exactly among itself. The identity is kept where it is no worse.

    >>> sinkhorn_orders(torch.tensor([[[0.0, 5.0], [4.0, 1.0]]])).tolist()
    [[1, 0]]

    References: Cuturi, "Sinkhorn distances" (2013); Mena et al., "Learning latent permutations with Gumbel-Sinkhorn
    networks" (2018).
    """
    scores = scores.to(torch.float64)
    deviation = scores.flatten(1).std(1, correction=0).clamp(min=1e-300)[:, None, None]
    u, v = (torch.zeros_like(scores.sum(axis, keepdim=True)) for axis in (2, 1))
    for temperature in TEMPERATURES:
        soft = temperature * deviation
        for _ in range(ROUNDS):
            u = -soft * ((scores + v) / soft).logsumexp(2, keepdim=True)
            v = -soft * ((scores + u) / soft).logsumexp(1, keepdim=True)
    return torch.stack([_hardened(own, plan) for own, plan in zip(scores, scores + u + v, strict=True)])


def _hardened(scores: Tensor, plan: Tensor) -> Tensor:
    """A permutation out of the logarithm of a soft one."""
    units = torch.arange(len(scores), device=scores.device)
    best = plan.argmax(0)  # of every column
    mutual = plan.argmax(1)[best] == units
    perm = torch.empty_like(best)
    perm[mutual] = best[mutual]
    left = (~mutual).nonzero().flatten()
    if len(left):
        free = torch.ones_like(mutual).index_fill_(0, best[mutual], False).nonzero().flatten()
        perm[left] = free[assign(scores[free][:, left])]
    return perm if scores[perm, units].sum() > scores.diagonal().sum() else units
