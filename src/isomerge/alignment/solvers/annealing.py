"""Orders by simulated annealing: swaps of two units, worse ones too while it is hot."""

from __future__ import annotations

import numpy as np
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
    table = scores.detach().to("cpu", torch.float64).numpy()
    pairs, n, _ = table.shape
    every, draw = np.arange(pairs)[:, None], np.random.default_rng(0)
    perm = np.tile(np.arange(n), (pairs, 1))
    reached = table[every, perm, np.arange(n)].sum(1)
    best, most = perm.copy(), reached.copy()
    heats = np.geomspace(HOTTEST, COLDEST, max(LEAST_ROUNDS, ROUNDS_PER_UNIT * n) if n > 1 else 0)
    deviation = table.std(axis=(1, 2))[:, None]
    for heat in heats:
        left, right = draw.permutation(n)[: n - n % 2].reshape(2, -1)
        own, other = perm[:, left], perm[:, right]
        gain = table[every, other, left] + table[every, own, right]
        gain -= table[every, own, left] + table[every, other, right]
        swaps = gain > heat * deviation * np.log1p(-draw.random(gain.shape))
        perm[:, left], perm[:, right] = np.where(swaps, other, own), np.where(swaps, own, other)
        reached = reached + np.where(swaps, gain, 0).sum(1)
        better = reached > most + 1e-12 * np.abs(most)
        best[better], most = perm[better], np.where(better, reached, most)
    return torch.from_numpy(best).to(scores.device)
