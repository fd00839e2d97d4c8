"""Permutations, signed or not: linear assignment, with an exit where the answer can be read off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isomerge.alignment.solvers.auction import FEW, auction, prices_for, step
from isomerge.symmetry.groups import Group, SignedPermutation

DIRECTIONS = 64
"""Of which a proof looks at the units."""


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
    perms, solved = _by_argmax(C[None])
    if bool(solved[0]):
        return perms[0], C[perms[0], units].to(torch.float64).sum()
    prices = prices_for(C)
    costs = C.detach().to("cpu", torch.float64).neg_()
    perm = _least(costs, prices)
    earned = -costs[perm, torch.arange(len(perm))].sum()
    return perm.to(C.device), earned if prices is None else earned + prices.double().sum().cpu()


def solve_permutation(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """`assign_batch`, which widens C by itself: C may be large here."""
    return assign_batch(C if unsigned is None else C + unsigned)


def solve_signed_permutation(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """`assign_signed` for each pair."""
    C = C.double()
    elements, scores = [], []
    for k in range(C.shape[0]):
        extra = None if unsigned is None else unsigned[k]
        order, sign = assign_signed(C[k], extra)
        elements.append(SignedPermutation.encode(order, sign))
        picked = torch.arange(group.size, device=C.device)
        earned = (C[k][order, picked] * sign).sum()
        scores.append(earned if extra is None else earned + extra[order, picked].sum())
    return torch.stack(elements), torch.stack(scores)


def solve_by_orders(
    group: Group, C: Tensor, unsigned: Tensor | None, orders: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The element of each pair whose order `orders` finds, signs and all, and what it earns."""
    C = C.double()
    apart = torch.zeros_like(C) if unsigned is None else unsigned.double()
    scores = (C.abs() if group.signed else C) + apart
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(f"Finding orders on scores of shape {tuple(C.shape)}: they hold NaN or infinite values.")
    perm = orders(scores)
    signed, rest = (table.gather(1, perm[:, None, :]).squeeze(1) for table in (C, apart))
    if not group.signed:
        return perm, (signed + rest).sum(-1)
    return SignedPermutation.encode(perm, torch.where(signed < 0, -1.0, 1.0)), (signed.abs() + rest).sum(-1)


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
    prices = prices_for(C)
    scores = C.detach().to("cpu", torch.float64)
    spoils = overwrite or scores.data_ptr() != C.data_ptr()
    return _least(scores.neg_() if spoils else -scores, prices).to(C.device)


def _least(costs: Tensor, prices: Tensor | None) -> Tensor:
    """The permutation of least cost; the prices are added to the columns first, which changes no order of costs."""
    if prices is not None:
        costs += prices.to("cpu", torch.float64)
    columns = torch.from_numpy(_linear_assignment(costs.numpy()))
    perm = torch.empty_like(columns)
    perm[columns] = torch.arange(len(columns))
    return perm


def assign_roughly(C: Tensor) -> Tensor:
    """A permutation within a percent or so of the best of `assign`: an auction, and the exact solver for its tail.

    For sweeps that are followed by another one.
    """
    _require_square(C, 2)
    if len(C) <= FEW:
        return assign(C)
    rows = auction(C, step(C, 1 / 8), len(C) // 50)[0]
    taken = rows >= 0
    perm = torch.empty_like(rows)
    perm[rows[taken]] = taken.nonzero().flatten()
    if not bool(taken.all()):
        free = (~taken).nonzero().flatten()
        units = torch.ones_like(taken).index_fill_(0, rows[taken], False).nonzero().flatten()
        perm[units] = free[assign(C[free][:, units])]
    return perm


def solve_permutation_roughly(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """`assign_roughly` for each pair."""
    C = C if unsigned is None else C + unsigned
    perm = torch.stack([assign_roughly(scores) for scores in C])
    return perm, C.gather(1, perm[:, None, :]).squeeze(1).to(torch.float64).sum(-1)


def assign_signed(C: Tensor, unsigned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Maximise `Σ_j s_j C[p_j, j] + unsigned[p_j, j]` over permutations p and signs s: assignment on |C| + unsigned.

    The element acts as `(gB)[j] = s_j B[p_j]`. `unsigned` is what the sign does not touch, such as the gate of a gated
    feed-forward unit. For a fixed p each sign is free, `s_j = sign C[p_j, j]`, hence |C|; a zero keeps the sign +1.

    >>> perm, signs = assign_signed(torch.tensor([[0.0, -2.0], [1.0, 0.0]]))
    >>> perm.tolist(), signs.tolist()
    ([1, 0], [1.0, -1.0])

    Reference: Ainsworth, Hayase, Srinivasa, "Git Re-Basin" (ICLR 2023), for the unsigned assignment.
    """
    score = C.to(torch.float64).abs()
    if unsigned is not None:
        score += unsigned
    perm = assign(score, overwrite=True)
    matched = C[perm, torch.arange(len(perm), device=C.device)]
    return perm, torch.where(matched < 0, -1.0, 1.0).to(torch.float64)


def identity_is_optimal(
    source: Tensor | Sequence[Tensor],
    anchor: Tensor | Sequence[Tensor],
    mirrored: Sequence[bool] = (),
    directions: int = DIRECTIONS,
    seed: int = 0,
    block: int = 512,
) -> bool:
    """True only if no permutation of the source units beats the identity; decided without the n × n matrix C.

    source, anchor: matrices (n, m_k) that share their rows (one row per unit), in any dtype. The test is
    `‖a_i − b_i‖ ≤ ½ min_{j≠i} ‖Πa_i − Πa_j‖` for all i, with Π onto `directions` orthonormal vectors. Then for j ≠ i
    `‖a_j − b_i‖ ≥ ‖a_j − a_i‖ − ‖a_i − b_i‖ ≥ ‖a_i − b_i‖`: each source unit is nearest to its own anchor unit, and
    the least sum of squared distances is the greatest `Σ ⟨b_p(j), a_j⟩` because the norms are fixed. False says
    nothing. Cost O(n k (n + Σ m_k)) with k directions, memory O(block · (n + max m_k)).

    `mirrored` says of each matrix whether a unit may change the sign of its row there, of all such rows at once. Then
    the identity has to beat those images as well, its own among them: the same proof with a_j and its mirror image.

    >>> A = torch.eye(4)
    >>> identity_is_optimal(A + 0.1, A), identity_is_optimal(A.flip(0), A), identity_is_optimal(-A, A, [True])
    (True, False, False)
    """
    sources = [source] if isinstance(source, Tensor) else list(source)
    anchors = [anchor] if isinstance(anchor, Tensor) else list(anchor)
    if [tuple(t.shape) for t in sources] != [tuple(t.shape) for t in anchors] or len({len(t) for t in anchors}) != 1:
        raise ValueError("The identity test needs matching matrices (n, m_k) that share the number of rows n.")
    flips = list(mirrored) or [False] * len(anchors)
    n, device = len(anchors[0]), anchors[0].device
    reach = torch.zeros(n, dtype=torch.float64, device=device)  # ‖a_i − b_i‖²
    generator = torch.Generator().manual_seed(seed)
    seen: list[tuple[Tensor, bool]] = []  # Πa_i of the rows that keep their sign, and of those that may change it
    for kind in sorted(set(flips)):
        pairs = [(b, a) for b, a, flip in zip(sources, anchors, flips, strict=True) if flip == kind]
        width = sum(a.shape[1] for _, a in pairs)
        Pi = torch.linalg.qr(torch.randn(width, min(directions, width), generator=generator, dtype=torch.float64))[0]
        parts = Pi.to(device).split([a.shape[1] for _, a in pairs])
        X = torch.zeros(n, Pi.shape[1], dtype=torch.float64, device=device)
        for start in range(0, n, block):
            rows = slice(start, start + block)
            for (b, a), part in zip(pairs, parts, strict=True):
                a64 = a[rows].to(torch.float64)
                X[rows].addmm_(a64, part)
                reach[rows] += (b[rows].to(device, torch.float64) - a64).square().sum(1)
        seen.append((X, kind))
    reach.sqrt_()
    # float32 halves the largest cost; 1e-5 of the norms covers its rounding (k ε ≈ 4e-6 of them, and 2e-7 for X
    # itself), so that a distance is never overstated. An accelerator may be told to round products further.
    length = sum((X.square().sum(1) for X, _ in seen), torch.zeros_like(reach))
    scale = length.mean().sqrt().clamp_min(1e-300)  # keeps float32 inside its range
    dtype = torch.float32 if device.type == "cpu" else torch.float64
    scaled = [((X / scale).to(dtype), kind) for X, kind in seen]
    norms = [X.square().sum(1) for X, _ in scaled]
    for start in range(0, n, block):
        rows = slice(start, start + block)
        nearest = torch.zeros(len(reach[rows]), n, dtype=dtype, device=device)
        own = torch.full_like(nearest[:, 0], torch.inf)  # a unit and its own mirror image
        for (X, kind), length2 in zip(scaled, norms, strict=True):
            products = X[rows] @ X.T
            lengths = (length2[rows, None] + length2).mul_(1 - 1e-5)
            nearest += lengths.sub_(products.abs_() if kind else products, alpha=2)
            if kind:
                own = 4 * length2[rows] * (1 - 1e-5)
        nearest.diagonal(start).copy_(own)
        within = 2 * reach[rows] <= nearest.clamp_min_(0).amin(1).double().sqrt() * scale
        if not bool(within.all()):  # "not all" answers NaN with False
            return False
    return True


def _linear_assignment(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The column of every row. SciPy is imported here: a merge that aligns nothing goes without it."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(costs)[1]  # type: ignore[no-any-return]
