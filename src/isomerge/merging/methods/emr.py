"""Elect, mask, rescale: one vector for all models, and each model written again from it."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import total
from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_index, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2405.17461")
def emr(group: TensorGroup, *, task: int | None = None, lambda_: float = 1.0) -> Combine:
    """Elect a sign for each weight and take the largest change that has it; or write one model again from this.

    τ = sign(Σ τ_k) · max |τ_k| over the models that agree with the sign. Model k again is base + s_k M_k τ, where M_k
    is 1 where τ_k has the sign of τ, and s_k = Σ |τ_k| / Σ |M_k τ| keeps the sum of magnitudes.

    Options:
        task: which model is written again from the elected vector, counted from 1; none is the elected vector itself
        lambda: how much of the vector is added to the base
    """
    model = None if task is None else task_index(task, group.models, "emr")
    scale = 1.0 if model is None else _rescaler(group, model)

    def combine(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        elected = _elected(vectors)
        if model is not None:
            elected.mul_((vectors[model] * elected > 0).to(elected.dtype))
        return onto_base(block, elected.mul_(scale * lambda_))

    return combine


def _elected(vectors: Tensor) -> Tensor:
    sign = vectors.sum(dim=0).sign()
    return (vectors * sign).clamp_min_(0).amax(dim=0) * sign


def _rescaler(group: TensorGroup, model: int) -> float:
    def sums(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        elected = _elected(vectors)
        masked = elected * (vectors[model] * elected > 0)
        return torch.stack([vectors[model].abs().sum(), masked.abs().sum()])

    own, kept = total(group, sums).expand(2).tolist()
    return own / kept if kept > 0 else 1.0
