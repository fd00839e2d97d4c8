"""Which units of several parents to keep, so that the chosen ones explain best what all of them write together."""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 1e-3  # relative to each column's own energy
ROUNDS = 8  # single units go in rounds, larger groups (heads) one at a time
COUPLED = 0.5  # two units that explain each other this well do not go in one round


def choose(gram: Tensor, written: Tensor, width: int, keep: int) -> Tensor:
    """The numbers of the groups to keep, in order. Columns come in groups of `width`.

    `gram` is XᵀX of all columns and `written` (columns, out) the weights they are written with, so that Y = X·written.
    Groups are given up from the least needed on: giving up group g raises min‖X_S W − Y‖² by tr(W_gᵀ [G⁻¹]_gg⁻¹ W_g).
    """
    gram = gram + DAMPING * torch.diag(gram.diagonal() + 1e-6 * gram.diagonal().mean())
    cross = gram @ written
    groups = gram.shape[0] // width
    alive = torch.arange(groups, device=gram.device)
    rounds = ROUNDS if width == 1 else groups - keep
    for number in range(rounds):
        target = round(groups - (groups - keep) * (number + 1) / rounds)
        columns = (alive[:, None] * width + torch.arange(width, device=gram.device)).flatten()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram[columns][:, columns]))
        weights = (inverse @ cross[columns]).reshape(len(alive), width, -1)
        if width == 1:
            costs = weights[:, 0].square().sum(-1) / inverse.diagonal()
            stays = _without_the_least(costs, inverse, len(alive) - target)
        else:
            own = torch.stack([inverse[k : k + width, k : k + width] for k in range(0, len(columns), width)])
            costs = (weights * torch.linalg.solve(own, weights)).sum((1, 2))
            stays = costs.argsort(stable=True)[len(alive) - target :].sort().values
        alive = alive[stays]
    return alive


def _without_the_least(costs: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Give up `count` units of least cost, never two at once that stand in for each other."""
    scale = inverse.diagonal().rsqrt()
    coupled = ((inverse * scale[:, None] * scale).abs() > COUPLED).cpu()
    order = costs.argsort(stable=True).tolist()
    held = torch.zeros(len(order), dtype=torch.bool)
    gone: list[int] = []
    for unit in order:
        if len(gone) == count:
            break
        if not held[unit]:
            gone.append(unit)
            held |= coupled[unit]
    known = set(gone)
    gone += [unit for unit in order if unit not in known][: count - len(gone)]
    stays = torch.ones(len(order), dtype=torch.bool)
    stays[torch.tensor(gone, dtype=torch.int64)] = False
    return stays.nonzero()[:, 0].to(costs.device)


def place(kept: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Parent and unit for each of the `size` places; a unit stands at its own place where that is free."""
    parent, unit = torch.full((size,), -1), torch.full((size,), -1)
    waiting = []
    for number in kept.tolist():
        m, u = divmod(number, size)
        if parent[u] < 0:
            parent[u], unit[u] = m, u
        else:
            waiting.append((m, u))
    for at, (m, u) in zip((parent < 0).nonzero()[:, 0].tolist(), waiting, strict=True):
        parent[at], unit[at] = m, u
    return parent, unit
