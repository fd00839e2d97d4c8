"""Parameter competition balancing."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import kth_smallest
from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

TAIL = 1e-4  # this share at either end of the magnitudes is set to where the rest ends


@method(base="required", reference="https://arxiv.org/abs/2410.02396")
def pcb(group: TensorGroup, *, ratio: float = 0.1, lambda_: float = 1.0) -> Combine:
    """Weigh each change by its size within its model and by its agreement with the others, and keep the best share.

    With a_k the magnitudes of τ_k scaled to 0…1, the score is exp(K a_k²) · tanh(τ_k Σ_j τ_j). The lowest scores but
    the share `ratio` weigh nothing, the highest 1, and the merged change is the weighted mean.

    Options:
        ratio: which share of each model's changes takes part
        lambda: how much of the merged task vector is added to the base
    """
    if not group.elements:
        return lambda block: block.tensors[0]
    last = group.elements - 1
    ends = [int(group.elements * TAIL), max(0, int(group.elements * (1 - TAIL) - 1))]
    magnitudes = kth_smallest(group, lambda block: task_vectors(block).abs_(), [ends] * group.models)
    low, high = zip(*(sorted(pair) for pair in magnitudes), strict=True)

    def scores(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        own = _scaled(vectors.abs(), block.like(low), block.like(high)).square_().mul_(group.models).exp_()
        return own.mul_((vectors * vectors.sum(dim=0)).tanh_())

    cut = min(last, max(0, int(group.elements * (1 - ratio))))
    least, most = zip(*kth_smallest(group, scores, [[cut, last]] * group.models), strict=True)

    def combine(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        clipped = vectors.sign().mul_(vectors.abs().clamp_(block.like(low), block.like(high)))
        share = _scaled(scores(block), block.like(least), block.like(most))
        merged = clipped.mul_(share).sum(dim=0).div_(share.sum(dim=0).clamp_min_(1e-12))
        return onto_base(block, merged.mul_(lambda_))

    return combine


def _scaled(numbers: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """From low…high to 0…1, what lies outside set to the ends; 1 throughout where low is high."""
    width = high - low
    scaled = (numbers.clamp(low, high) - low).div_(torch.where(width > 0, width, 1))
    return torch.where(width > 0, scaled, 1)
