"""Permutations: linear assignment, and two ways of not having to solve it."""

from __future__ import annotations

from collections.abc import Sequence

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


def identity_is_optimal(
    source: Tensor | Sequence[Tensor],
    anchor: Tensor | Sequence[Tensor],
    directions: int = 64,
    seed: int = 0,
    block: int = 512,
) -> bool:
    """True only if no permutation of the source units beats the identity; decided without the n × n matrix C.

    source, anchor: matrices (n, m_k) that share their rows (one row per unit), in any dtype. The test is
    `‖a_i − b_i‖ ≤ ½ min_{j≠i} ‖Πa_i − Πa_j‖` for all i, with Π onto `directions` orthonormal vectors. Then for j ≠ i
    `‖a_j − b_i‖ ≥ ‖a_j − a_i‖ − ‖a_i − b_i‖ ≥ ‖a_i − b_i‖`: each source unit is nearest to its own anchor unit, and
    the least sum of squared distances is the greatest `Σ ⟨b_p(j), a_j⟩` because the norms are fixed. False says
    nothing. Cost O(n k (n + Σ m_k)) with k directions, memory O(block · (n + max m_k)).

    >>> A = torch.eye(4)
    >>> identity_is_optimal(A + 0.1, A), identity_is_optimal(A.flip(0), A)
    (True, False)
    """
    sources = [source] if isinstance(source, Tensor) else list(source)
    anchors = [anchor] if isinstance(anchor, Tensor) else list(anchor)
    if [tuple(t.shape) for t in sources] != [tuple(t.shape) for t in anchors] or len({len(t) for t in anchors}) != 1:
        raise ValueError("The identity test needs matching matrices (n, m_k) that share the number of rows n.")
    n, device = len(anchors[0]), anchors[0].device
    reach = torch.empty(n, dtype=torch.float64, device=device)  # ‖a_i − b_i‖
    generator = torch.Generator().manual_seed(seed)
    width = sum(t.shape[1] for t in anchors)
    Pi = torch.linalg.qr(torch.randn(width, min(directions, width), generator=generator, dtype=torch.float64))[0]
    parts = Pi.to(device).split([t.shape[1] for t in anchors])
    X = torch.zeros(n, Pi.shape[1], dtype=torch.float64, device=device)  # Πa_i
    for start in range(0, n, block):
        rows = slice(start, start + block)
        total = torch.zeros_like(reach[rows])
        for b, a, part in zip(sources, anchors, parts, strict=True):
            a64 = a[rows].to(torch.float64)
            X[rows].addmm_(a64, part)
            total += (b[rows].to(device, torch.float64) - a64).square().sum(1)
        reach[rows] = total.sqrt()
    norms = X.square().sum(1)
    for start in range(0, n, block):
        rows = slice(start, start + block)
        # 1e-13 of the norms covers the rounding of this difference, so that a distance is never overstated.
        apart = (norms[rows, None] + norms).mul_(1 - 1e-13).addmm_(X[rows], X.T, alpha=-2).clamp_min_(0)
        apart.diagonal(start).fill_(torch.inf)
        if not bool((2 * reach[rows] <= apart.amin(1).sqrt()).all()):  # "not all" also answers NaN with False
            return False
    return True
