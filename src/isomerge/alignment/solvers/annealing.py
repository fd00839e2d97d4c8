"""Orders by simulated annealing: swaps of two units, worse ones too while it is hot."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROUNDS = 200
ROUNDS_PER_UNIT = 10  # every unit meets every other about so often
HOTTEST, COLDEST = 0.5, 0.01  # of the scores' deviation


def annealed_orders(scores: Tensor) -> Tensor:
    """Nearly the permutations that maximise `Σ_j scores[perm[j], j]`: (pairs, n, n) → (pairs, n).

    In every round all units are paired at random, and each pair swaps its partners if that gains, or else with the
    probability exp(gain / T). Swaps of disjoint pairs do not touch each other's gain, so a round is one step of n / 2
    swaps. T falls geometrically from half the deviation of the scores to a hundredth of it. The draw is fixed, and
    the best order seen is kept, the identity first.

    >>> annealed_orders(torch.tensor([[[0.0, 5.0], [4.0, 1.0]]])).tolist()
    [[1, 0]]

    References: Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing" (1983); for neural networks Entezari
    et al., "The role of permutation invariance in linear mode connectivity" (2022).
    """
    table = scores.detach().to("cpu", torch.float64)
    pairs, n, _ = table.shape
    draw = torch.Generator().manual_seed(0)
    perm = torch.arange(n).repeat(pairs, 1)
    reached = _earned(table, perm)
    best, most = perm.clone(), reached.clone()
    deviation = table.flatten(1).std(1, correction=0)[:, None]
    rounds = max(LEAST_ROUNDS, ROUNDS_PER_UNIT * n) if n > 1 else 0
    cooling = (COLDEST / HOTTEST) ** (1 / max(1, rounds - 1))
    every = torch.arange(pairs)[:, None]
    for number in range(rounds):
        left, right = torch.randperm(n, generator=draw)[: n - n % 2].view(2, -1)
        own, other = perm[:, left], perm[:, right]
        gain = table[every, other, left] + table[every, own, right]
        gain -= table[every, own, left] + table[every, other, right]
        heat = HOTTEST * cooling**number * deviation
        luck = torch.rand(gain.shape, generator=draw, dtype=torch.float64)
        swaps = gain > heat * luck.log()
        perm[:, left], perm[:, right] = torch.where(swaps, other, own), torch.where(swaps, own, other)
        reached += torch.where(swaps, gain, 0).sum(1)
        better = reached > most + 1e-12 * most.abs()
        best[better], most = perm[better], torch.where(better, reached, most)
    return best.to(scores.device)


def _earned(table: Tensor, perm: Tensor) -> Tensor:
    return table.gather(1, perm[:, None, :]).squeeze(1).sum(-1)
