"""Balance: choose, among all equivalent factor pairs of a head or unit, the one whose two sides weigh the same."""

from __future__ import annotations

import torch
from torch import Tensor


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
