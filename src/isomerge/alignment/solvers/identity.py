"""A proof that nothing needs to be permuted, far cheaper than looking for a permutation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def identity_is_optimal(
    source: Tensor | Sequence[Tensor],
    anchor: Tensor | Sequence[Tensor],
    mirrored: Sequence[bool] = (),
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
