"""What noise alone would let a group gain: the measure that tells siblings from strangers.

Noise lets a group of dimension k gain about k/n of the squared distance of n parameters, *if* it is the same for every
parameter. A fine-tune changes a bias and a table by very different amounts, so each tensor is measured in units of its
own change, `w = n / ‖A − B‖²`; a plain or size-weighted sum lets one short vector pass for a whole layer.
"""

from __future__ import annotations

import math

from torch import Tensor

from isomerge.alignment.distance import squared

LEAST_CHANGE = 1e-10  # of the squared size: a tensor that hardly changed counts as much as one that changed by this


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
