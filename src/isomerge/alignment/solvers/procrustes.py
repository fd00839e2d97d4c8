"""Rotations: the orthogonal element that best moves source units onto anchor units."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.alignment.solvers.polar import finite, polar


def rotation(C: Tensor) -> Tensor:
    """The orthogonal g that maximises `tr(g C)`, the agreement of gB with A for `C = B Aᵀ`: `g = polar(C)ᵀ`.

    C: (..., e, e), source × anchor. Reference: Schönemann (1966); Theorem 4.1 of the founding paper.

    >>> B = torch.eye(2, dtype=torch.float64)
    >>> A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> torch.allclose(rotation(B @ A.T) @ B, A)
    True
    """
    return polar(C).mT


def nuclear_norm(C: Tensor) -> Tensor:
    """`‖C‖_* = max_g tr(g C)` over orthogonal g: what a pair of heads scores once it is rotated. C: (..., e, e).

    >>> nuclear_norm(torch.diag(torch.tensor([3.0, -4.0]))).item()
    7.0
    """
    C = finite(C)
    if C.device.type == "cpu":
        values: Tensor = torch.linalg.svdvals(C)
        return values.sum(-1)
    return (polar(C) * C).sum((-2, -1))  # matmul only, where singular values are slow


def rotation_fixing_ones(C: Tensor) -> Tensor:
    """The orthogonal g with `g 1 = 1` that maximises `tr(g C)`: `g = polar(P C P + s uuᵀ)ᵀ`, any s > 0.

    `u = 1/√d`, `P = I − uuᵀ`: the rotations a LayerNorm without gain commutes with (SliceGPT, Ashkboos et al. 2024).
    With g = uuᵀ + PgP the objective is constant + tr(g PCP), so the problem is a rotation on the complement of u.

    >>> g = rotation_fixing_ones(torch.randn(5, 5, dtype=torch.float64))
    >>> torch.allclose(g.sum(1), torch.ones(5, dtype=torch.float64))
    True
    """
    C = _complement_of_ones(finite(C))
    d = C.shape[-1]
    # s at the size of a typical singular value, so that it does not worsen the condition number
    s = torch.linalg.matrix_norm(C) / d**0.5
    s = torch.where(s > 0, s, torch.ones_like(s))
    return polar(C + s[..., None, None] / d).mT


def partial_isometry(C: Tensor, rtol: float = 1e-10) -> Tensor:
    """`g = V_r U_rᵀ` over the singular values above `rtol · σ_max`: the part of the rotation that C determines.

    Unlike the full polar factor of a singular C it is unique; `g gᵀ` projects onto the space found, whose dimension is
    `g.square().sum()`. C: (..., e, e). Reference: Golub and Van Loan, "Matrix Computations", §6.4.

    >>> partial_isometry(torch.diag(torch.tensor([2.0, 0.0]))).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    U, S, Vh = torch.linalg.svd(finite(C))
    keep = S.gt(rtol * S[..., :1]).to(U.dtype)  # Not ge, or a matrix of all zeros would keep everything.
    return torch.matmul(Vh.mT, keep[..., :, None] * U.mT)


def partial_isometry_fixing_ones(C: Tensor, rtol: float = 1e-10) -> Tensor:
    """`partial_isometry(P C P) + uuᵀ`: unique, and it still keeps the all-ones vector, `g 1 = 1`.

    >>> partial_isometry_fixing_ones(torch.zeros(2, 2)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    g = partial_isometry(_complement_of_ones(finite(C)), rtol)
    return _complement_of_ones(g) + 1.0 / C.shape[-1]


def _complement_of_ones(C: Tensor) -> Tensor:
    """P C P by means, without forming P."""
    C = C - C.mean(-1, keepdim=True)
    return C - C.mean(-2, keepdim=True)
