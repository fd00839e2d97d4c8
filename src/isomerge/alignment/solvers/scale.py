"""Sizes: the scale of a head or unit, and the balance of its two factors.

Balancing chooses, among all equivalent factor pairs of a head or unit, the one whose two sides weigh the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.symmetry.groups import Group


def balance(X: Tensor, Y: Tensor, max_condition: float = 1e8) -> tuple[Tensor, Tensor]:
    """The symmetric positive definite S with `(SX)(SX)ᵀ = (S⁻ᵀY)(S⁻ᵀY)ᵀ`, per head, and which heads were skipped.

    X: (P, e, N1) moves by S and Y: (P, e, N2) by S⁻ᵀ. S² is the metric geometric mean `(XXᵀ)⁻¹ # (YYᵀ)`, computed
    from triangular factors, `XXᵀ = L_x L_xᵀ` by QR of Xᵀ, never from the squares: `svd(L_xᵀ L_y) = U Σ Vᵀ` gives
    `S_raw = Σ^½ Uᵀ L_x⁻¹`, and S is its positive polar factor. S_raw balances too, but jumps where two values of Σ
    cross; S is a smooth function of the weights, so models that were close stay close. Heads where X or Y has a
    condition number above `max_condition`, or fewer than e columns, get S = I and skipped = True.

    >>> S, skipped = balance(2 * torch.eye(2)[None], torch.eye(2)[None] / 2)
    >>> S[0].round(decimals=9).tolist(), skipped.tolist()
    ([[0.5, 0.0], [0.0, 0.5]], [False])

    Reference: Bhatia, "Positive Definite Matrices" (2007), chapter 4 (the geometric mean).
    """
    if X.device.type != "cpu":  # an accelerator factorises one small matrix after the other, far slower than a CPU
        S, skipped = balance(X.cpu(), Y.cpu(), max_condition)
        return S.to(X.device), skipped.to(X.device)
    P, e = X.shape[0], X.shape[1]
    eye = torch.eye(e, dtype=torch.float64).expand(P, e, e)
    if X.shape[2] < e or Y.shape[2] < e:
        return eye.clone(), torch.ones(P, dtype=torch.bool)
    Lx, Ly = _lower_factor(X), _lower_factor(Y)
    good = (_condition(Lx) <= max_condition) & (_condition(Ly) <= max_condition)
    Lx, Ly = torch.where(good[:, None, None], Lx, eye), torch.where(good[:, None, None], Ly, eye)
    U, sigma, _ = torch.linalg.svd(Lx.mT @ Ly)
    S_raw = torch.linalg.solve_triangular(Lx, (U * sigma.sqrt()[:, None, :]).mT, upper=False, left=False)
    _, s, Wh = torch.linalg.svd(S_raw)
    S = Wh.mT @ (s[:, :, None] * Wh)
    return torch.where(good[:, None, None], (S + S.mT) / 2, eye), ~good


def _lower_factor(X: Tensor) -> Tensor:
    """L with L Lᵀ = X Xᵀ: (P, e, N) -> (P, e, e)."""
    R: Tensor = torch.linalg.qr(X.to(torch.float64).mT, mode="r").R
    return R.mT


def _condition(L: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(L)
    return values[:, 0] / values[:, -1]  # 0/0 is NaN, which is not ≤ anything: skipped


def balance_scale(forward_norm2: Tensor, dual_norm2: Tensor) -> Tensor:
    """The s > 0 with `‖s x‖ = ‖y / s‖`, from squared norms: `s = (‖y‖² / ‖x‖²)^¼`; 1 where either side is zero.

    >>> balance_scale(torch.tensor([1.0, 0.0]), torch.tensor([16.0, 1.0])).tolist()
    [2.0, 1.0]
    """
    forward, dual = forward_norm2.to(torch.float64), dual_norm2.to(torch.float64)
    free = (forward > 0) & (dual > 0)
    return torch.where(free, (dual / torch.where(free, forward, 1.0)) ** 0.25, 1.0)


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


def solve_scale(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """Balancing has chosen the size, so only signs are left to solve, where the group has them."""
    diagonal = C.double().diagonal(dim1=-2, dim2=-1)
    signs = torch.where(diagonal < 0, -1.0, 1.0) if group.signed else torch.ones_like(diagonal)
    return signs.to(torch.float64), (signs * diagonal).sum(-1)


def score_scale(group: Group, C: Tensor, unsigned: Tensor | None) -> Tensor:
    """What `solve_scale` earns, in the precision of C: there may be one pair for every two units."""
    diagonal = C.diagonal(dim1=-2, dim2=-1)
    return (diagonal.abs() if group.signed else diagonal).sum(-1)


def balance_matrix(group: Group, X: Tensor, Y: Tensor) -> tuple[Tensor, int]:
    """`balance` for any batch, and how many of its members were skipped."""
    batch = X.shape[:-2]
    element, skipped = balance(X.reshape(-1, *X.shape[-2:]), Y.reshape(-1, *Y.shape[-2:]))
    return element.reshape(*batch, *element.shape[-2:]), int(skipped.sum())


def balance_factor(group: Group, X: Tensor, Y: Tensor) -> tuple[Tensor, int]:
    """`balance_scale` for every unit."""
    return balance_scale(X.square().sum(-1), Y.square().sum(-1)), 0
