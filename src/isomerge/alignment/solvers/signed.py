"""Signed permutations: units that may be swapped and negated."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.alignment.solvers.assignment import assign


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
