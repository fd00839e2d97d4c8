"""Rotary frequencies: one complex number each, `q ← c q`, `k ← k / conj(c)`.

Inner products are `⟨x, y⟩ = Σ x · conj(y)` with the source first: `a = ⟨q_B, q_A⟩`, `b = ⟨k_B, k_A⟩`.
Reference: Su et al., "RoFormer" (2021), for the positions that leave exactly these transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.alignment.solvers.scale import balance_scale
from isomerge.symmetry.groups import Rotary

_GRID = 257


def rotary_phase(a: Tensor, b: Tensor) -> Tensor:
    """The unit c that maximises `Re(c a) + Re(c b)`: phase `−arg(a + b)`, and 1 where the sum is zero.

    >>> rotary_phase(torch.tensor([2j]), torch.tensor([1j])).tolist()
    [-1j]
    """
    total = (a + b).to(torch.complex128)
    size = total.abs()
    return torch.where(size > 0, total.conj() / torch.where(size > 0, size, 1.0), 1.0 + 0.0j)


def rotary_sign(a: Tensor) -> Tensor:
    """The sign that maximises `s · a`, a real: all that a norm on queries and keys leaves. Zero gives +1.

    >>> rotary_sign(torch.tensor([-2.0, 0.0, 3.0])).tolist()
    [-1.0, 1.0, 1.0]
    """
    return torch.where(a < 0, -1.0, 1.0).to(torch.float64)


def rotary_scaled(a: Tensor, b: Tensor, q_norm2: Tensor, k_norm2: Tensor) -> Tensor:
    """The c = r e^{iφ} that minimises `‖c q_B − q_A‖² + ‖k_B / conj(c) − k_A‖²`, all frequencies at once.

    For given r the phase is `−arg(r a + b/r)`, which leaves `‖q_B‖² r² + ‖k_B‖²/r² − 2 |r a + b/r|`. With
    `x = 2 log(r / (‖k_B‖/‖q_B‖)^½)` it is `f(x) = 2 cosh x − 2 √(α eˣ + β e⁻ˣ + γ)` up to a factor; a stationary point
    has `|x| ≤ 2 log(1 + √α + √β)` and there are at most three minima, so a grid brackets them and each is refined.
    A zero norm leaves r = 1.

    >>> one = torch.ones(1)
    >>> rotary_scaled(torch.tensor([2.0 + 0j]), torch.tensor([0.5 + 0j]), one, one).real.round(decimals=6).tolist()
    [2.0]
    """
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    q_norm2, k_norm2 = q_norm2.to(torch.float64), k_norm2.to(torch.float64)
    free = (q_norm2 > 0) & (k_norm2 > 0)
    N, M = torch.where(free, q_norm2, 1.0), torch.where(free, k_norm2, 1.0)
    base = (M / N) ** 0.25
    # s, t: ra + b/r = (MN)^¼ · (s e^{x/2} + t e^{−x/2}) at r = base · e^{x/2}, with f measured in units of (MN)^½
    unit = (M * N) ** 0.5
    s, t = a * base / unit, b / (base * unit)
    limit = 2.05 * torch.log1p(s.abs() + t.abs()) + 1e-3  # past the bound by some cells: every minimum has neighbours
    x = limit[..., None] * torch.linspace(-1, 1, _GRID, dtype=torch.float64, device=a.device)
    s, t = s[..., None], t[..., None]

    def cost(x: Tensor) -> Tensor:
        half = torch.exp(x / 2)
        return 2 * torch.cosh(x) - 2 * (s * half + t / half).abs()

    f = cost(x)
    lowest = f[..., 1:-1].le(f[..., :-2]) & f[..., 1:-1].le(f[..., 2:])
    inner = torch.where(lowest, f[..., 1:-1], torch.inf).topk(3, largest=False).indices
    low, high = x.gather(-1, inner), x.gather(-1, inner + 2)
    for _ in range(48):  # ternary search: (2/3)^48 of a bracket is below what f can resolve, √eps
        third = (high - low) / 3
        left_is_better = cost(low + third) < cost(high - third)
        low, high = torch.where(left_is_better, low, low + third), torch.where(left_is_better, high - third, high)
    x = (low + high) / 2
    x = x.gather(-1, cost(x).argmin(-1, keepdim=True))
    x = _newton(x, s, t).squeeze(-1)
    r = torch.where(free, base * torch.exp(x / 2), 1.0)
    return r * rotary_phase(r * a, b / r)


def _newton(x: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Two steps on f′ = 0: comparing values of f finds x to 1e-8 only."""
    for _ in range(2):
        p, m = s.abs().square() * torch.exp(x), t.abs().square() * torch.exp(-x)
        h = p + m + 2 * (s * t.conj()).real
        root = torch.where(
            h > 0, h, 1.0
        ).sqrt()  # h = 0 only where nothing pulls (p = m), or at a kink, never a minimum
        slope = 2 * torch.sinh(x) - (p - m) / root
        curve = 2 * torch.cosh(x) - (p + m) / root + (p - m).square() / (2 * root**3)
        step = slope / curve
        x = torch.where((curve > 0) & (step.abs() < 1e-4), x - step, x)
    return x


def complex_pairs(group: Rotary, C: Tensor) -> Tensor:
    """Σ x·conj(y) for every rotary pair, read off a real cross-covariance (…, n, n) -> (…, n/2)."""
    half = group.size // 2
    j = torch.arange(half, device=C.device)
    re, im = (j, j + half) if group.layout == "half" else (2 * j, 2 * j + 1)
    return torch.complex(C[..., re, re] + C[..., im, im], C[..., im, re] - C[..., re, im])


def solve_rotary(group: Rotary, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """A phase, a sign or nothing per pair, as the group declares."""
    z = complex_pairs(group, C.double())
    if group.phase == "any":
        return rotary_phase(z, torch.zeros_like(z)), z.abs().sum(-1)
    if group.phase == "sign":
        sign = rotary_sign(z.real).to(torch.complex128)
        return sign, (sign.real * z.real).sum(-1)
    return torch.ones_like(z), z.real.sum(-1)


def score_rotary(group: Rotary, C: Tensor, unsigned: Tensor | None) -> Tensor:
    """What the best phases earn, without building them."""
    if group.phase == "any":
        return complex_pairs(group, C.double()).abs().sum(-1)
    return solve_rotary(group, C, unsigned)[1]


def balance_rotary(group: Rotary, X: Tensor, Y: Tensor) -> tuple[Tensor, int]:
    """`balance_scale` for every pair."""
    squares = [group.pairs(z).abs().square().sum(-1) for z in (X, Y)]
    return balance_scale(*squares).to(torch.complex128), 0
