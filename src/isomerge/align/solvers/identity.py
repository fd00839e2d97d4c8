"""A proof that nothing needs to be permuted, far cheaper than looking for a permutation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    # float32 halves the largest cost; 1e-5 of the norms covers its rounding (k ε ≈ 4e-6 of them, and 2e-7 for X
    # itself), so that a distance is never overstated.
    scale = X.square().sum(1).mean().sqrt().clamp_min(1e-300)  # keeps float32 inside its range
    X = (X / scale).float()
    norms = X.square().sum(1)
    for start in range(0, n, block):
        rows = slice(start, start + block)
        apart = (norms[rows, None] + norms).mul_(1 - 1e-5).addmm_(X[rows], X.T, alpha=-2).clamp_min_(0)
        apart.diagonal(start).fill_(torch.inf)
        within = 2 * reach[rows] <= apart.amin(1).double().sqrt() * scale
        if not bool(within.all()):  # "not all" answers NaN with False
            return False
    return True
