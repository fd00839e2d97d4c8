"""Averages in which each weight of each model counts by how important it is there.

The importances (diagonal Fisher information, for example) are tensors of the same names and shapes in files that the
options name; the group has them as `option_tensors` under the option's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

NEEDED = "{name} weighs by importances, but none were given for '{tensor}'. Name the files with '{option}'."


@method(base="optional", reference="https://arxiv.org/abs/1612.00796")
def ewc(
    group: TensorGroup,
    *,
    importance: PerModel[str | None] = each(None),
    base_importance: str | None = None,
    weight: PerModel[float] = each(1.0),
    strength: float = 1.0,
) -> Combine:
    """Elastic consolidation: the weights nearest to all models, each distance counted by importance.

    (Σ w_k F_k W_k + s F_0 base) / (Σ w_k F_k + s F_0); the plain mean where every importance is 0. Without the
    importance of a base it is Fisher merging (arXiv 2111.09832).

    Options:
        importance: a safetensors file of importances for each model, with the model's tensor names
        base_importance: the same for the base; without it the base does not count
        weight: how much each model's importance counts
        strength: how much the base's importance counts
    """
    _needed(group, "ewc", "importance")
    anchored = group.has_base and "base_importance" in group.option_tensors

    def combine(block: RowBlock) -> Tensor:
        counts = block.option_tensors["importance"] * block.like(weight)
        models = block.tensors
        if anchored and block.base is not None:
            counts = torch.cat([counts, block.option_tensors["base_importance"] * strength])
            models = torch.cat([models, block.base.unsqueeze(0)])
        # Relative to the largest, so that importances of any size multiply without under- or overflow.
        largest = counts.abs().amax(dim=0)
        counts /= torch.where(largest > 0, largest, 1)
        total = counts.sum(dim=0)
        mean = (counts * models).sum(dim=0) / torch.where(total == 0, 1, total)
        return torch.where(total == 0, block.tensors.mean(dim=0), mean)

    return combine


@method(base="required", reference="https://arxiv.org/abs/2303.17574")
def elastic_weight_removal(
    group: TensorGroup,
    *,
    importance: PerModel[str | None] = each(None),
    base_importance: str | None = None,
    weight: PerModel[float] = each(1.0),
) -> Combine:
    """Take what the models learned away from the base, most where it matters to them and least where it matters to it.

    base − Σ_k w_k F_k τ_k / (F_0 + Σ_k w_k F_k): the importance-weighted mean of the base and of the base with each
    change taken back.

    Options:
        importance: a safetensors file of importances for each model, with the model's tensor names
        base_importance: the same for the base
        weight: how much of each model is removed
    """
    _needed(group, "elastic_weight_removal", "importance")
    _needed(group, "elastic_weight_removal", "base_importance")

    def combine(block: RowBlock) -> Tensor:
        counts = block.option_tensors["importance"] * block.like(weight)
        own = block.option_tensors["base_importance"][0]
        largest = torch.maximum(counts.abs().amax(dim=0), own.abs())
        scale = torch.where(largest > 0, largest, 1)
        counts, own = counts / scale, own / scale
        total = counts.sum(dim=0) + own
        removed = (task_vectors(block) * counts).sum(dim=0) / torch.where(total == 0, 1, total)
        return onto_base(block, removed.neg_())

    return combine


def _needed(group: TensorGroup, name: str, option: str) -> None:
    if option not in group.option_tensors:
        raise RequestError(NEEDED.format(name=name, tensor=group.name, option=option))
