"""What an alignment gains where there is nothing to find.

The best of many choices gains something even between unrelated weights, and a rotation of a stream fits the noise of a
fine-tuning too. So the same solver runs once more, on a model that shares with the other what the two share in place,
and whose rest is shuffled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.checking.sums import product, squared


def shuffled_rest(a: Tensor, b: Tensor, random: torch.Generator) -> Tensor:
    """c·b + the rest of `a` with every axis in a random order, where c·b is the part of `a` along `b`.

    Of siblings c is near 1 and their difference is shuffled; of strangers c is near 0 and everything is. c is never
    below 0: −b in its place is a sign that can be turned, and so something to find.
    """
    size = squared(b)
    share = max(0.0, product(a, b) / size) if size else 0.0
    rest = a - share * b
    for axis, length in enumerate(rest.shape):
        rest = rest.index_select(axis, torch.randperm(length, generator=random))
    return share * b + rest


def more_than_chance(gain: float, chance: float) -> bool:
    """Half as much again as chance, or half of what chance leaves, whichever is less: a gain is never more than 1.

    >>> more_than_chance(0.26, 0.25), more_than_chance(0.5, 0.25), more_than_chance(0.99, 0.8)
    (False, True, True)
    """
    return gain >= min(1.5 * chance, (1 + chance) / 2)
