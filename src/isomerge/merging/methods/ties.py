"""Task vectors in conflict: only those that agree on a sign, that several models share, or the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import largest
from isomerge.merging.methods.task_vectors import add_agreeing, agreeing, onto_base, task_index, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2306.01708")
def ties(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    normalize: bool = True,
    rescale: bool = False,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Keep the largest changes of each model, elect a sign for each weight, and average those that agree with it.

    Options:
        weight: how much of each task vector, in the election and in the average
        density: which share of each task vector is kept, the largest first
        normalize: divide by the weights of the models that agree
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take no memory here
        paper: one model, one vote: neither the election nor the average knows weights
    """
    if paper:
        weight, normalize = [1.0] * group.models, True
    return add_agreeing(largest(group, density, rescale), weight, normalize, lambda_)


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
    task: int | None = None,
    lambda_: float = 1.0,
) -> Combine:
    """Merge task vectors and keep the weights that at least k tasks need, by their TALL masks.

    Task t needs a weight where |τ_t| ≥ λ_tall |τ − τ_t|, τ being the merged task vector. With fewer than k models, all
    of them must need it. With `task`, those that this task needs: its model, written again from the merged vector.

    Options:
        weight: how much of each task vector
        density: which share of each task vector is merged, the largest first
        k: how many tasks must need a weight
        tall_lambda: how large a task's own change must be beside what the others add
        elect: elect signs as in TIES; otherwise add all, as in task arithmetic
        normalize: divide by the weights of the models merged
        task: which task's weights are kept, counted from 1; none is those of at least k tasks
        lambda: how much of the merged task vector is added to the base
    """
    pruned = largest(group, density)
    tasks = range(group.models) if task is None else [task_index(task, group.models, "consensus_ties")]
    needed = min(k, len(tasks))

    def combine(block: RowBlock) -> Tensor:
        vectors = pruned.vectors(block)
        if elect:
            merged = agreeing(vectors, weight, [1.0] * group.models, weight if normalize else None)
        else:
            merged = vectors.mul_(block.like(weight)).sum(dim=0)
            if normalize and abs(sum(weight)) >= 1e-8:
                merged.div_(sum(weight))
        votes, own = torch.zeros_like(merged), task_vectors(block)
        for vector in (own[each_task] for each_task in tasks):
            votes += vector.abs() >= (merged - vector).abs_().mul_(tall_lambda)
        return onto_base(block, merged.mul_((votes >= needed).to(merged.dtype)).mul_(lambda_))

    return combine


@method(base="required", reference="https://arxiv.org/abs/2407.06322")
def magmax(group: TensorGroup, *, lambda_: float = 1.0) -> Combine:
    """Of each weight take the change of largest magnitude: base + λ τ_k, k = argmax |τ_k|; opposite equals cancel.

    Options:
        lambda: how much of the merged task vector is added to the base
    """

    def combine(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        up, down = vectors[0].clone(), vectors[0]
        for vector in vectors[1:]:
            torch.maximum(up, vector, out=up)
            torch.minimum(down, vector, out=down)
        # The sign of up + down says whose magnitude is larger.
        sign = (up + down).sign_()
        merged = up.mul_(sign.clamp_min(0)).sub_(down.mul_(sign.clamp_max(0)))
        return onto_base(block, merged.mul_(lambda_))

    return combine
