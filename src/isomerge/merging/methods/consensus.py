"""Consensus merging: drop what only one task needs."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import largest
from isomerge.merging.methods.task_vectors import agreeing, onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2405.07813")
def consensus_ties(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    k: int = 2,
    tall_lambda: float = 0.4,
    elect: bool = True,
    normalize: bool = False,
    lambda_: float = 1.0,
) -> Combine:
    """Merge task vectors and keep the weights that at least k tasks need, by their TALL masks.

    Task t needs a weight where |τ_t| ≥ λ_tall |τ − τ_t|, τ being the merged task vector. With fewer than k models, all
    of them must need it.

    Options:
        weight: how much of each task vector
        density: which share of each task vector is merged, the largest first
        k: how many tasks must need a weight
        tall_lambda: how large a task's own change must be beside what the others add
        elect: elect signs as in TIES; otherwise add all, as in task arithmetic
        normalize: divide by the weights of the models merged
        lambda: how much of the merged task vector is added to the base
    """
    pruned = largest(group, density)
    needed = min(k, group.models)

    def combine(block: RowBlock) -> Tensor:
        vectors = pruned.vectors(block)
        if elect:
            merged = agreeing(vectors, weight, [1.0] * group.models, weight if normalize else None)
        else:
            merged = vectors.mul_(block.like(weight)).sum(dim=0)
            if normalize and abs(sum(weight)) >= 1e-8:
                merged.div_(sum(weight))
        votes = torch.zeros_like(merged)
        for vector in task_vectors(block):
            votes += vector.abs() >= (merged - vector).abs_().mul_(tall_lambda)
        return onto_base(block, merged.mul_((votes >= needed).to(merged.dtype)).mul_(lambda_))

    return combine
