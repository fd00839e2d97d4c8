"""Reinforced agent merging: shared changes are averaged, unique ones are kept whole."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import total
from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2601.13572")
def ram(group: TensorGroup, *, epsilon: float = 1e-5) -> Combine:
    """Average each weight over the models that changed it; what only one has changed is kept whole.

    Options:
        epsilon: a change up to this size is none
    """
    return _merged([1.0] * group.models, epsilon)


@method(base="required", reference="https://arxiv.org/abs/2601.13572")
def ramplus_tl(group: TensorGroup, *, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5) -> Combine:
    """As ram, and a model's unique changes grow by 1 + r · min(shared / unique, alpha), counted in each tensor.

    Options:
        r: how strongly unique changes are amplified
        alpha: the largest ratio of shared to unique changes that counts
        epsilon: a change up to this size is none
    """

    def counts(block: RowBlock) -> Tensor:
        changed = torch.hardshrink(task_vectors(block), epsilon).sign_().abs_()
        by = changed.sum(dim=0)
        return torch.stack([(changed * mask).reshape(group.models, -1).sum(dim=1) for mask in (by > 1, by == 1)])

    shared, unique = total(group, counts).expand(2, group.models).tolist()
    ratios = [s / max(u, epsilon) if s else 0.0 for s, u in zip(shared, unique, strict=True)]
    return _merged([1 + r * min(max(ratio, 0.0), alpha) for ratio in ratios], epsilon)


def _merged(amplified: list[float], epsilon: float) -> Combine:
    def combine(block: RowBlock) -> Tensor:
        vectors = torch.hardshrink(task_vectors(block), epsilon)
        by = vectors.sign().abs_().sum(dim=0)
        merged = vectors.sum(dim=0).div_(by.clamp_min(1))
        if any(a != 1 for a in amplified):
            grown = (vectors * block.like([a - 1 for a in amplified])).sum(dim=0)
            merged.add_(grown.mul_((by == 1).to(grown.dtype)))
        return onto_base(block, merged)

    return combine
