"""Permutations: linear assignment, with an exit where the answer can be read off."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def assign(C: Tensor, *, overwrite: bool = False) -> Tensor:
    """The permutation that maximises `Σ_j C[perm[j], j]`; it acts as `(gB)[j] = B[perm[j]]`. C: (n, n).

    Exact and deterministic; among equals the identity is preferred. `overwrite=True` lets the solver spoil C, which
    saves a copy of n² float64 (1 GB at n = 11,008).

    >>> assign(torch.tensor([[0.0, 5.0], [4.0, 1.0]])).tolist()
    [1, 0]

    Reference: Crouse, "On implementing 2D rectangular assignment algorithms" (2016), in SciPy.
    """
    _require_square(C, 2)
    perm, solved = _by_argmax(C[None])
    return perm[0] if bool(solved[0]) else _by_scipy(C, overwrite)


def assign_batch(C: Tensor) -> tuple[Tensor, Tensor]:
    """`assign` for each member of C (P, n, n): permutations (P, n) and their scores `Σ_j C[perm[j], j]` (P,).

    >>> perm, score = assign_batch(torch.eye(3).expand(2, 3, 3))
    >>> perm.tolist(), score.tolist()
    ([[0, 1, 2], [0, 1, 2]], [3.0, 3.0])
    """
    _require_square(C, 3)
    perm, solved = _by_argmax(C)
    for p in (~solved).nonzero().flatten().tolist():
        perm[p] = _by_scipy(C[p], overwrite=False)
    return perm, C.gather(1, perm[:, None, :]).squeeze(1).to(torch.float64).sum(-1)


def assign_spoiling(C: Tensor) -> tuple[Tensor, Tensor]:
    """`assign` and its score `Σ_j C[perm[j], j]`, with C as the workspace: no second n × n matrix.

    >>> perm, score = assign_spoiling(torch.tensor([[0.0, 5.0], [4.0, 1.0]], dtype=torch.float64))
    >>> perm.tolist(), score.item()
    ([1, 0], 9.0)
    """
    _require_square(C, 2)
    units = torch.arange(len(C), device=C.device)
    found, solved = _by_argmax(C[None])
    if bool(solved[0]):
        return found[0], C[found[0], units].to(torch.float64).sum()
    costs = C.detach().to("cpu", torch.float64).neg_()
    columns = torch.from_numpy(linear_sum_assignment(costs.numpy())[1])
    perm = torch.empty_like(columns)
    perm[columns] = torch.arange(len(columns))
    return perm.to(C.device), -costs[perm, torch.arange(len(perm))].sum()


def _require_square(C: Tensor, ndim: int) -> None:
    if C.ndim != ndim or C.shape[-1] != C.shape[-2]:
        raise ValueError(f"Assignment needs square scores in {ndim} dimensions, but the shape is {tuple(C.shape)}.")


def _by_argmax(C: Tensor) -> tuple[Tensor, Tensor]:
    """A permutation that reaches the best value of every column, or of every row, is optimal: no other can pass it."""
    P, n, _ = C.shape
    units = torch.arange(n, device=C.device).expand(P, n)
    if n == 0:
        return units.clone(), torch.ones(P, dtype=torch.bool, device=C.device)
    best, by_column = C.max(1)
    if not bool(torch.isfinite(best).all()):  # max hands NaN on, so no copy of C is needed to look for it
        raise ValueError(f"Assignment on scores of shape {tuple(C.shape)}: they hold NaN or infinite values.")
    by_row = C.argmax(2)
    identity = (C.diagonal(dim1=1, dim2=2) >= best).all(-1)
    columns = (by_column.sort(-1)[0] == units).all(-1)
    rows = (by_row.sort(-1)[0] == units).all(-1)
    perm = torch.where(columns[:, None], by_column, by_row.argsort(-1))
    return torch.where(identity[:, None], units, perm), identity | columns | rows


def _by_scipy(C: Tensor, overwrite: bool) -> Tensor:
    scores = C.detach().to("cpu", torch.float64)
    if overwrite or scores.data_ptr() != C.data_ptr():
        # SciPy would copy n² numbers to change the sign; ours may be spoiled.
        columns = linear_sum_assignment(scores.neg_().numpy())[1]
    else:
        columns = linear_sum_assignment(scores.numpy(), maximize=True)[1]
    perm = torch.empty(len(columns), dtype=torch.int64)
    perm[torch.from_numpy(columns)] = torch.arange(len(columns))
    return perm.to(C.device)
