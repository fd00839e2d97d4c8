"""The scale of one head or unit: `Q ← a Q`, `K ← K / a`."""

from __future__ import annotations

import torch
from torch import Tensor


def head_scale(q_norm2: Tensor, qq: Tensor, kk: Tensor, k_norm2: Tensor, *, signed: bool) -> Tensor:
    """The a that minimises `‖a Q_B − Q_A‖² + ‖K_B / a − K_A‖²`, batched.

    q_norm2 = ‖Q_B‖², qq = ⟨Q_B, Q_A⟩, kk = ⟨K_B, K_A⟩, k_norm2 = ‖K_B‖². Setting the derivative to zero gives
    `‖Q_B‖² a⁴ − qq a³ + kk a − ‖K_B‖² = 0`; of its real roots the one of least cost is taken, of the positive ones
    with `signed=False`. A zero norm leaves a = 1. Reference: equations 11–12 of the founding paper.

    >>> one = torch.ones(1)
    >>> head_scale(one, 2 * one, one / 2, one, signed=False).round(decimals=9).tolist()
    [2.0]
    """
    N, p, q, M = (value.to(torch.float64) for value in (q_norm2, qq, kk, k_norm2))
    free = (N > 0) & (M > 0)
    N, M = torch.where(free, N, 1.0), torch.where(free, M, 1.0)
    base = (M / N) ** 0.25  # a = base · x turns the quartic into x⁴ − p x³ + q x − 1 and the cost into its own units
    unit = (M * N) ** 0.5
    p, q = p * base / unit, q / (base * unit)
    companion = torch.zeros(*p.shape, 4, 4, dtype=torch.float64, device=p.device)
    companion[..., 0, 0], companion[..., 0, 2], companion[..., 0, 3] = p, -q, 1.0
    companion[..., [1, 2, 3], [0, 1, 2]] = 1.0
    # Real parts of all four: the best real root is among them, and no other value can cost less than it does.
    x = torch.linalg.eigvals(companion).real
    allowed = (x != 0) if signed else (x > 0)
    x = torch.where(allowed, x, 1.0)
    cost = x**2 - 2 * p[..., None] * x + 1 / x**2 - 2 * q[..., None] / x
    x = x.gather(-1, torch.where(allowed, cost, torch.inf).argmin(-1, keepdim=True)).squeeze(-1)
    for _ in range(3):
        slope = 4 * x**3 - 3 * p * x**2 + q
        step = (x**4 - p * x**3 + q * x - 1) / torch.where(slope == 0, 1.0, slope)
        x = torch.where(step.abs() < 0.1 * x.abs(), x - step, x)  # a polish, never a jump to another root or sign
    return torch.where(free, base * x, 1.0)
