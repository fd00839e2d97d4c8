"""Ways to drop a part of every task vector: the smallest changes, both ends, or at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from isomerge.merging import random_numbers
from isomerge.merging.methods.block_sums import kth_smallest, total
from isomerge.merging.methods.task_vectors import Pruned, task_vectors, unpruned
from isomerge.merging.run.rows import RowBlock, TensorGroup

NOTHING = 1e-7  # sums below it are not worth matching


def largest(group: TensorGroup, density: Sequence[float], rescale: bool = False) -> Pruned:
    """The largest changes of each model, at least one unless its density is 0."""
    ranks = [[group.elements - kept] if 0 < (kept := _count(group, d)) < group.elements else [] for d in density]
    bounds = [
        (statistics[0] if statistics else 0.0 if d > 0 else math.inf, math.inf)
        for statistics, d in zip(_magnitudes(group, ranks), density, strict=True)
    ]
    return between(group, bounds, rescale)


def middle(
    group: TensorGroup, density: Sequence[float], gamma: Sequence[float], rescale: bool = False, strict: bool = False
) -> Pruned:
    """What is left without the share `gamma` of the largest changes and without the smallest, `density` in all.

    Where both cannot be had, the density is kept and fewer of the largest go; `strict` has it the other way round.
    """
    ranks = []
    for d, g in zip(density, gamma, strict=True):
        kept, top = _count(group, d), int(g * group.elements)
        first = max(0, group.elements - kept - top)
        end = max(1, group.elements - top) if strict else first + kept
        everything = end - first >= group.elements
        ranks.append([first, end - 1] if kept and not everything else [])
    bounds = [
        (statistics[0], statistics[1]) if statistics else (0.0 if d > 0 else math.inf, math.inf)
        for statistics, d in zip(_magnitudes(group, ranks), density, strict=True)
    ]
    return between(group, bounds, rescale)


def _count(group: TensorGroup, density: float) -> int:
    """How many elements a density keeps: one at least, so that no tensor is lost because it is small."""
    return min(group.elements, max(1, int(density * group.elements))) if density > 0 else 0


def _magnitudes(group: TensorGroup, ranks: list[list[int]]) -> list[list[float]]:
    if not any(ranks):
        return [[] for _ in ranks]
    return kth_smallest(group, lambda block: task_vectors(block).abs_(), ranks)


def between(group: TensorGroup, bounds: Sequence[tuple[float, float]], rescale: bool) -> Pruned:
    """The changes whose magnitude is in a closed range. Equal magnitudes share their fate, so that the order in which a
    tensor is stored decides nothing."""
    zero = torch.zeros((), dtype=group.dtype)

    def prune(block: RowBlock, vectors: Tensor) -> Tensor:
        for vector, (low, high) in zip(vectors, bounds, strict=True):
            if low == math.inf:
                vector.zero_()
                continue
            outliers = torch.hardshrink(vector, high) if high < math.inf else None
            if low > 0:  # hardshrink drops what equals its bound, and the bound itself is to stay
                torch.hardshrink(vector, float(torch.nextafter(zero + low, zero)), out=vector)
            if outliers is not None:
                vector.sub_(outliers)
        return vectors

    if all(bound == (0.0, math.inf) for bound in bounds):
        return unpruned(group.models)
    return _pruned(group, prune, rescale)


def at_random(
    group: TensorGroup,
    density: Sequence[float],
    draw: Callable[[RowBlock, int], Tensor],
    rescale: bool,
) -> Pruned:
    """What `draw(block, model)` says is kept of the models whose density is below 1.

    To match the norms the masks are needed twice. They are drawn once and remembered, a bit an element.
    """
    remembered: dict[tuple[int, int, int], np.ndarray] = {}

    def mask(block: RowBlock, model: int) -> Tensor:
        like = block.tensors[0]
        place = (block.start, like.numel(), model)
        bits = remembered.get(place)
        if bits is not None:
            kept = torch.from_numpy(np.unpackbits(bits, count=like.numel())).reshape(like.shape).to(like.device)
        else:
            kept = draw(block, model)
            if rescale:
                remembered[place] = np.packbits(kept.cpu().numpy().reshape(-1))
            kept = kept.view(torch.uint8)
        return kept.to(like.dtype)

    def prune(block: RowBlock, vectors: Tensor) -> Tensor:
        for model, (vector, d) in enumerate(zip(vectors, density, strict=True)):
            if d <= 0:
                vector.zero_()
            elif d < 1:
                vector.mul_(mask(block, model))
        return vectors

    if all(d >= 1 for d in density):
        return unpruned(group.models)
    return _pruned(group, prune, rescale)


def bernoulli(group: TensorGroup, density: Sequence[float], rescale: bool) -> Pruned:
    """Each change by itself with probability `density`."""
    return at_random(
        group, density, lambda block, model: random_numbers.chosen(group, block, model, density[model]), rescale
    )


Prune = Callable[[RowBlock, Tensor], Tensor]
"""Drops a part of a block's task vectors, in place."""


def _pruned(group: TensorGroup, prune: Prune, rescale: bool) -> Pruned:
    scale = _norm_ratios(group, prune) if rescale else [1.0] * group.models
    return Pruned(lambda block: prune(block, task_vectors(block)), scale)


def _norm_ratios(group: TensorGroup, prune: Prune) -> list[float]:
    """By how much the sum of magnitudes has shrunk, for each model."""

    def sums(block: RowBlock) -> Tensor:
        magnitudes = task_vectors(block).abs_()
        whole = magnitudes.reshape(group.models, -1).sum(dim=1)
        return torch.stack([whole, prune(block, magnitudes).reshape(group.models, -1).sum(dim=1)])

    before, after = total(group, sums).expand(2, group.models).tolist()
    return [b / a if min(a, b) >= NOTHING else 1.0 for b, a in zip(before, after, strict=True)]
