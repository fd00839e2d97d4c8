"""Orthogonal matching pursuit for many targets at once."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-6
"""A residual, or what an atom adds to those that are chosen, counts as nothing below this share of its length."""


def matching_pursuit(targets: Tensor, atoms: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(targets, most) which atoms, and their coefficients: x ≈ Σ_s α_s a_s with at most so many of them.

    Atom after atom, the one with the largest |⟨r, a⟩| joins, where r = x − P x is what the least-squares combination
    of those that are chosen leaves (Pati, Rezaiifar and Krishnaprasad 1993). A target that is reached ends early; its
    other coefficients are 0.

    >>> atoms = torch.eye(3, dtype=torch.float64)
    >>> chosen, coefficients = matching_pursuit(torch.tensor([[0.0, 3.0, -1.0]], dtype=torch.float64), atoms, 2)
    >>> chosen.tolist(), coefficients.tolist()
    ([[1, 2]], [[3.0, -1.0]])
    """
    count, width = targets.shape
    steps = min(most, len(atoms), width)
    basis = targets.new_zeros(count, steps, width)
    upper = torch.eye(steps, dtype=targets.dtype, device=targets.device).repeat(count, 1, 1)
    chosen = torch.zeros(count, steps, dtype=torch.int64, device=targets.device)
    taken = torch.zeros(count, len(atoms), dtype=torch.bool, device=targets.device)
    every = torch.arange(count, device=targets.device)
    lengths = torch.linalg.vector_norm(targets, dim=1)
    left, going = targets.clone(), lengths > 0
    for step in range(steps):
        scores = (left @ atoms.T).abs().masked_fill_(taken, -1.0)
        best = scores.argmax(1)
        taken[every, best] = True
        atom = atoms[best]
        along = torch.einsum("tsd,td->ts", basis[:, :step], atom)
        rest = atom - torch.einsum("ts,tsd->td", along, basis[:, :step])
        again = torch.einsum("tsd,td->ts", basis[:, :step], rest)  # twice is enough
        rest, along = rest - torch.einsum("ts,tsd->td", again, basis[:, :step]), along + again
        norm = torch.linalg.vector_norm(rest, dim=1)
        going = going & (norm > LEAST * torch.linalg.vector_norm(atom, dim=1))
        going = going & (torch.linalg.vector_norm(left, dim=1) > LEAST * lengths)
        if not going.any():
            break
        chosen[going, step] = best[going]
        basis[going, step] = rest[going] / norm[going, None]
        upper[going, :step, step] = along[going]
        upper[going, step, step] = norm[going]
        part = torch.einsum("td,td->t", basis[:, step], left)
        left = left - part[:, None] * basis[:, step]
    along = torch.einsum("tsd,td->ts", basis, targets)
    return chosen, torch.linalg.solve_triangular(upper, along[:, :, None], upper=True)[:, :, 0]
