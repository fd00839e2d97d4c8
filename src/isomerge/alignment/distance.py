"""Distances between tensors, and how much of one noise alone explains: the measure that tells siblings from strangers.

Noise lets a group of dimension k gain about k/n of the squared distance of n parameters, *if* it is the same for every
parameter. A fine-tune changes a bias and a table by very different amounts, so each tensor is measured in units of its
own change, `w = n / ‖A − B‖²`; a plain or size-weighted sum lets one short vector pass for a whole layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Numbers compared at once: as many as fit a processor's cache, or keep an accelerator busy."""
LEAST_CHANGE = 1e-10  # of the squared size: a tensor that hardly changed counts as much as one that changed by this


def squared(tensor: Tensor, other: Tensor | None = None) -> float:
    """‖tensor − other‖², or ‖tensor‖², in float64 and part by part.

    >>> squared(torch.tensor([3.0, 4.0])), squared(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
    (25.0, 4.0)
    """
    block = BLOCKS.get(tensor.device.type, BLOCKS["cuda"])
    parts = [each.flatten().split(block) for each in (tensor, other) if each is not None]
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for some in zip(*parts, strict=True):
        values = some[0].double() if other is None else some[0].double() - some[1].double()
        total += values @ values
    return float(total)


def precision(source: Tensor, anchor: Tensor, least: float = LEAST_CHANGE) -> float:
    """The weight of a tensor's squared distance that makes it one per parameter; 0 for a tensor of zeros."""
    size = squared(anchor) + squared(source)
    return anchor.numel() / max(squared(source, anchor), least * size) if size > 0 else 0.0


def is_noise(gain: float, dimension: int, parameters: int) -> bool:
    """Whether a gain (the fall of Σ w ‖A − B‖², w from `precision`) is no more than noise explains.

    Twice its expected value k; for a group of few dimensions four standard deviations above it (a χ² of k degrees).
    A gain of more than three quarters of everything is never noise, or a single head could not be recovered.

    >>> is_noise(150, 100, 10_000), is_noise(250, 100, 10_000), is_noise(8, 3, 24)
    (True, False, True)
    """
    limit = max(2 * dimension, dimension + 4 * math.sqrt(2 * dimension))
    return gain <= min(limit, 0.75 * parameters) if dimension else gain <= 0
