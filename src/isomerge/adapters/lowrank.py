"""Low-rank factors: the best ones of a matrix, the shortest form of a product, and the error of what was dropped."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_UP_TO = 1024
"""The shorter side up to which the whole decomposition is computed; beyond it, only the leading part."""
NEGLIGIBLE = 1e-7
"""Singular values below this share of the largest are rounding noise of float32 factors."""


def factorise(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, Vᵀ of left @ right without forming the product: QR of both sides, then a small SVD."""
    q, r = torch.linalg.qr(left.double())
    p, s = torch.linalg.qr(right.double().T)
    u, values, vt = torch.linalg.svd(r @ s.T, full_matrices=False)
    return q @ u, values, vt @ p.T


def decompose(matrix: Tensor, rank: int | None, energy: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triples of a matrix: as many as `rank` or `energy` can ask for."""
    shorter = min(matrix.shape)
    if shorter <= EXACT_UP_TO:
        return _svd(matrix.double())
    total = float(matrix.square().sum(dtype=torch.float64))
    wanted = rank if rank is not None else 64
    while True:
        count = 2 * wanted + 16
        if count >= shorter // 2:
            return _svd(matrix)
        # Its random start is drawn from a seed of its own: the same matrix always has the same factors.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, values, v = torch.svd_lowrank(matrix, q=count, niter=6)
        kept = float(values[:wanted].double().square().sum())
        if rank is not None or energy is None or kept >= energy * total:
            return u, values, v.T
        wanted *= 2


def choose_rank(values: Tensor, total: float, rank: int | None, energy: float | None) -> int:
    """How many singular values to keep: enough for the share `energy` of the squared norm, at most `rank`, never none.

    >>> choose_rank(torch.tensor([3.0, 1.0, 0.0]), 10.0, None, 0.9)
    1
    """
    keep = int((values > NEGLIGIBLE * values[0]).sum()) if len(values) else 0
    if energy is not None:
        reached = values.double().square().cumsum(0) >= energy * total * (1 - 1e-12)
        keep = min(keep, int((~reached).sum()) + 1)
    return max(1, min(keep, len(values), rank if rank is not None else keep))


def halves(
    u: Tensor, values: Tensor, vt: Tensor, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """B (rows, rank) and A (rank, columns), each with the square root of the singular values."""
    root = values[:rank].sqrt()
    return (u[:, :rank] * root).to(dtype).contiguous(), (root[:, None] * vt[:rank]).to(dtype).contiguous()


def squared_error(matrix: Tensor, left: Tensor, right: Tensor, rows: int = 4096) -> float:
    """‖matrix − left @ right‖², in blocks of rows."""
    total = 0.0
    for start in range(0, len(matrix), rows):
        part = matrix[start : start + rows] - left[start : start + rows].to(matrix.dtype) @ right.to(matrix.dtype)
        total += float(part.square().sum(dtype=torch.float64))
    return total


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u, values, vt
