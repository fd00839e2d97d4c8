"""Select, calculate, erase."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import kth_smallest, products, total
from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import agreeing, onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

FLOOR = 1e-6


@method(base="required", reference="https://arxiv.org/abs/2408.07990")
def sce(group: TensorGroup, *, select_topk: float = 1.0, int8_mask: bool = False, paper: bool = False) -> Combine:
    """Select where the models differ most, weigh each by the size of its changes, and average those of one sign.

    Options:
        select_topk: which share of the weights is changed at all, those on which the models differ most first
        int8_mask: accepted for recipes of other tools; masks take no memory here
        paper: the sum is not divided by the weights of the models that agree, and small changes count like large ones
    """
    least = _smallest_selected(group, select_topk)

    def selected(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        return vectors if least <= 0 else vectors.mul_((_variance(vectors) >= least).to(vectors.dtype))

    def sizes(block: RowBlock) -> Tensor:
        return torch.stack([products([vector.reshape(-1)])[0, 0] for vector in selected(block)])

    means = total(group, sizes).expand(group.models) / max(1, group.elements)
    uniform = means.sum() == 0 if paper else means.sum() < FLOOR
    share = [1 / group.models] * group.models if uniform else (means / means.sum()).tolist()

    def combine(block: RowBlock) -> Tensor:
        counts = None if paper else share
        return onto_base(block, agreeing(selected(block), [1.0] * group.models, share, counts, FLOOR))

    return combine


def _smallest_selected(group: TensorGroup, share: float) -> float:
    """The variance from which on a weight is selected. Where the models do not differ at all, everything is."""
    if share >= 1 or not group.elements:
        return 0.0
    if share <= 0:
        return float("inf")
    different = int(total(group, lambda block: _variance(block.deltas).count_nonzero()))
    if not different:
        return 0.0
    kept = max(1, int(different * share))
    return kth_smallest(group, lambda block: _variance(block.deltas).unsqueeze(0), [[group.elements - kept]])[0][0]


def _variance(vectors: Tensor) -> Tensor:
    """Over the models, element by element."""
    mean = vectors.mean(dim=0)
    result = torch.zeros_like(mean)
    for vector in vectors:
        result.add_((vector - mean).square_())
    return result.div_(len(vectors))
