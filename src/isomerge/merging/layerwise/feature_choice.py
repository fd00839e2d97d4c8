"""Which units of several parents to keep, so that the chosen ones explain best what all of them write together."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

DAMPING = 1e-3  # relative to each group's own energy
ROUNDS = 8  # all costs are computed afresh this often
CANDIDATES = 2  # times as many as go in a round; within a round only these are looked at
FEWEST = 64  # … and at least this many


def choose(gram: Tensor, written: Tensor, width: int, keep: int) -> Tensor:
    """The numbers of the groups to keep, in order. Columns come in groups of `width`.

    `gram` is XᵀX of all columns and `written` (columns, out) the weights they are written with, so that Y = X·written.
    Groups are given up one by one, the least needed first: giving up group g raises min‖X_S W − Y‖² by
    tr(W_gᵀ [G⁻¹]_gg⁻¹ W_g).
    """
    groups = gram.shape[0] // width
    gram = gram + DAMPING * _own_blocks(gram, width)
    scale = gram.diagonal().mean()
    gram = gram + 1e-9 * (scale if scale > 0 else 1.0) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    cross = gram @ written
    alive = torch.arange(groups, device=gram.device)
    for number in range(ROUNDS):
        target = round(groups - (groups - keep) * (number + 1) / ROUNDS)
        if target == len(alive):
            continue
        columns = _columns(alive, width)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram[columns][:, columns]))
        gone = _least_needed(inverse, inverse @ cross[columns], width, len(alive) - target)
        stays = torch.ones(len(alive), dtype=torch.bool, device=gram.device)
        stays[gone] = False
        alive = alive[stays]
    return alive


def _least_needed(inverse: Tensor, weights: Tensor, width: int, count: int) -> Tensor:
    """Give up `count` groups. After each, G⁻¹ and W of those left follow from what they were, so the costs are exact:
    of two units that stand in for each other, one goes and the other is then needed."""
    costs = _costs(inverse, weights, width)
    candidates = costs.argsort(stable=True)[: max(CANDIDATES * count, FEWEST)].sort().values
    columns = _columns(candidates, width)
    inverse, weights = inverse[columns][:, columns], weights[columns]
    left = torch.ones(len(candidates), dtype=torch.bool, device=inverse.device)
    gone = []
    for _ in range(count):
        costs = _costs(inverse, weights, width).masked_fill(~left, torch.inf)
        group = int(costs.argmin())
        own = slice(group * width, (group + 1) * width)
        factor = torch.linalg.solve(inverse[own, own], inverse[own])  # (width, columns)
        weights = weights - factor.T @ weights[own]
        inverse = inverse - factor.T @ inverse[own]
        inverse[own, own] = torch.eye(width, dtype=inverse.dtype, device=inverse.device)  # it is not asked again
        left[group] = False
        gone.append(group)
    return candidates[torch.tensor(gone, device=candidates.device)]


def _costs(inverse: Tensor, weights: Tensor, width: int) -> Tensor:
    if width == 1:
        return weights.square().sum(-1) / inverse.diagonal()
    groups = len(inverse) // width
    own = torch.stack([inverse[k : k + width, k : k + width] for k in range(0, len(inverse), width)])
    weights = weights.reshape(groups, width, -1)
    costs: Tensor = (weights * torch.linalg.solve(own, weights)).sum((1, 2))
    return costs


def _columns(groups: Tensor, width: int) -> Tensor:
    return (groups[:, None] * width + torch.arange(width, device=groups.device)).flatten()


def _own_blocks(gram: Tensor, width: int) -> Tensor:
    """The energy of each group by itself: unlike the diagonal, it turns with the basis inside a head."""
    blocks = torch.zeros_like(gram)
    for k in range(0, len(gram), width):
        blocks[k : k + width, k : k + width] = gram[k : k + width, k : k + width]
    return blocks


def place(kept: Tensor, counts: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """Parent and unit for each of the `size` places; a unit stands at its own place where that is free. Parents have
    `counts` units, numbered one parent after the other. A place that nothing is left for has the parent -1."""
    parent, unit = torch.full((size,), -1), torch.zeros(size, dtype=torch.int64)
    starts = [0, *itertools.accumulate(counts)]
    waiting = []
    for number in kept.tolist():
        m = bisect.bisect_right(starts, number) - 1
        u = number - starts[m]
        if u < size and parent[u] < 0:
            parent[u], unit[u] = m, u
        else:
            waiting.append((m, u))
    free = (parent < 0).nonzero()[:, 0].tolist()
    for at, (m, u) in zip(free[: len(waiting)], waiting, strict=True):
        parent[at], unit[at] = m, u
    return parent, unit
