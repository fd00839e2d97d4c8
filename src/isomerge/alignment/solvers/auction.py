"""The auction: a near-optimal assignment in a few passes over the scores, and the prices that make an exact one short.

Every source unit without a partner bids for the anchor unit it gains most from, by what it gains over its second best
and a little more (ε); the highest bid takes the unit and sets its price. A bid that is refused costs one pass over one
row, so most of the work is done in parallel when all units bid, and the long tail of a few that outbid each other is
left to an exact solver. With prices p the scores `C − p` have the same best assignment as C, and nearly every row has
its greatest value in a column of its own: shortest augmenting paths are short there.

Only elementwise operations and maxima, so the result is the same on any device and with any number of threads.

Reference: Bertsekas, "The auction algorithm: a distributed relaxation method for the assignment problem" (1988).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 512
"""Scores looked at together: no second n × n matrix."""
FEW = 512
"""Units up to which the exact solver is as fast without prices."""
PASSES = 16
ROUNDS = 512
"""The most work: where many rows want the same columns, as with equal scores, an exact solver is faster."""


def auction(C: Tensor, epsilon: float, left: int) -> tuple[Tensor, Tensor]:
    """The partner of each row of C (n, n), −1 for about `left` of them, and the price of each column.

    More stay without a partner where the work would exceed `PASSES` over all scores. Every partner is within `epsilon`
    of the best a row could get at these prices. Ties go to the lower number.

    >>> partner, prices = auction(torch.tensor([[4.0, 3.0], [5.0, 0.0]]), 0.1, 0)
    >>> partner.tolist()
    [1, 0]
    """
    n, device = len(C), C.device
    numbers = torch.arange(n, device=device)
    owner, partner = torch.full((2, n), -1, device=device)
    prices = torch.zeros(n, dtype=C.dtype, device=device)
    free, work = numbers, 0
    for _ in range(ROUNDS):
        if len(free) <= left or work > PASSES * n:
            break
        work += len(free)
        wanted, offer = _bids(C, free, prices, epsilon)
        price = prices.new_full((n,), -math.inf).scatter_reduce_(0, wanted, offer, "amax")
        highest = offer == price[wanted]
        buyer = torch.full_like(numbers, n).scatter_reduce_(0, wanted[highest], free[highest], "amin")
        sold = (buyer < n).nonzero().flatten()
        former = owner[sold]
        partner[former[former >= 0]] = -1
        owner[sold], prices[sold] = buyer[sold], price[sold]
        partner[buyer[sold]] = sold
        free = (partner < 0).nonzero().flatten()
    return partner, prices


def _bids(C: Tensor, free: Tensor, prices: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Which column each of the rows wants, and what it offers."""
    wanted, offers = [], []
    for rows in free.split(ROWS):
        gain = C[rows] - prices
        best, column = gain.max(1)
        second = gain.scatter_(1, column[:, None], -math.inf).amax(1)
        wanted.append(column)
        offers.append(prices[column] + (best - second) + epsilon)
    return torch.cat(wanted), torch.cat(offers)


def step(C: Tensor, share: float) -> float:
    """An ε in proportion to the spread of the scores: a power of two, so that no rounding of the spread decides it."""
    n = len(C)
    sample = C[:: max(1, n // ROWS)].to(torch.float64)
    spread = float(sample.square().mean() - sample.mean().square())
    if not math.isfinite(spread):
        raise ValueError(f"Assignment on scores of shape {tuple(C.shape)}: they hold NaN or infinite values.")
    return share * 2.0 ** round(math.log2(spread) / 2) if spread > 0 else 1.0


def prices_for(C: Tensor) -> Tensor | None:
    """Prices that shorten an exact assignment on C; None where C is small."""
    if len(C) <= FEW:
        return None
    return auction(C, step(C, 1 / 32), len(C) // 200)[1]
