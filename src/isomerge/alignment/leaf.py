"""The group picks the solver: the best element of one space, and what it is worth, from a cross-covariance.

`C` is (pairs, n, n), source × anchor, summed over every tensor the space touches; `unsigned` the part that comes from
axes without a sign. Scores are what the element earns: Σ ⟨g·B, A⟩.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.alignment import solvers
from isomerge.symmetry.groups import (
    Group,
    Invertible,
    Permutation,
    Rotary,
    RotationFixingOnes,
    Scale,
    SignedPermutation,
    SignedScale,
    Trivial,
)


def score(group: Group, C: Tensor, unsigned: Tensor | None = None) -> Tensor:
    """What the best element earns for each pair, without building it where that is cheaper."""
    if isinstance(group, Invertible) and not isinstance(group, RotationFixingOnes):
        return solvers.nuclear_norm(C)
    if isinstance(group, Rotary) and group.phase == "any":
        return complex_pairs(group, C.double()).abs().sum(-1)
    return solve(group, C, unsigned)[1]


def solve(group: Group, C: Tensor, unsigned: Tensor | None = None, *, spoil: bool = False) -> tuple[Tensor, Tensor]:
    """The best element for each pair, and what it earns. `spoil` lets the solver use C as its workspace."""
    if not isinstance(group, Permutation):  # an assignment widens C by itself, and C may be large there
        C = C.double()
    if isinstance(group, Trivial):
        total = C if unsigned is None else C + unsigned
        return group.identity(C.shape[:1]).to(C.device), _trace(total)
    if isinstance(group, Permutation) and spoil and unsigned is None and len(C) == 1:
        order, earned = solvers.assign_spoiling(C[0])
        return order[None], earned[None]
    if isinstance(group, Permutation):
        return solvers.assign_batch(C if unsigned is None else C + unsigned)
    if isinstance(group, SignedPermutation):
        return _signed(group, C, unsigned)
    if isinstance(group, Rotary):
        return _rotary(group, C)
    if isinstance(group, RotationFixingOnes):
        g = solvers.rotation_fixing_ones(C)
        return g, _trace(g @ C)
    if isinstance(group, Invertible):  # balanced or not, what is left to solve is orthogonal
        g = solvers.rotation(C)
        return g, _trace(g @ C)
    if isinstance(group, SignedScale):
        diagonal = C.diagonal(dim1=-2, dim2=-1)
        signs = torch.where(diagonal < 0, -1.0, 1.0) if not isinstance(group, Scale) else torch.ones_like(diagonal)
        return signs.to(torch.float64), (signs * diagonal).sum(-1)
    raise AssertionError(f"no solver for {group}")


def _signed(group: SignedPermutation, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    elements, scores = [], []
    for k in range(C.shape[0]):
        extra = None if unsigned is None else unsigned[k]
        order, sign = solvers.assign_signed(C[k], extra)
        elements.append(group.encode(order, sign))
        picked = torch.arange(group.size, device=C.device)
        earned = (C[k][order, picked] * sign).sum()
        scores.append(earned if extra is None else earned + extra[order, picked].sum())
    return torch.stack(elements), torch.stack(scores)


def _rotary(group: Rotary, C: Tensor) -> tuple[Tensor, Tensor]:
    z = complex_pairs(group, C)
    if group.phase == "any":
        return solvers.rotary_phase(z, torch.zeros_like(z)), z.abs().sum(-1)
    if group.phase == "sign":
        sign = solvers.rotary_sign(z.real).to(torch.complex128)
        return sign, (sign.real * z.real).sum(-1)
    return torch.ones_like(z), z.real.sum(-1)


def complex_pairs(group: Rotary, C: Tensor) -> Tensor:
    """Σ x·conj(y) for every rotary pair, read off a real cross-covariance (…, n, n) -> (…, n/2)."""
    half = group.size // 2
    j = torch.arange(half, device=C.device)
    re, im = (j, j + half) if group.layout == "half" else (2 * j, 2 * j + 1)
    return torch.complex(C[..., re, re] + C[..., im, im], C[..., im, re] - C[..., re, im])


def _trace(M: Tensor) -> Tensor:
    return M.diagonal(dim1=-2, dim2=-1).sum(-1)
