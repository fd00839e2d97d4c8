"""Fisher merging: elastic consolidation without a base, with a floor under the importances."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.methods.block_sums import total
from isomerge.merging.methods.ewc import NEEDED, ewc
from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

NOTHING = 1e-20  # of the information of the model that has most: float32 keeps no digits much below


@method(reference="https://arxiv.org/abs/2111.09832")
def fisher(
    group: TensorGroup,
    *,
    importance: PerModel[str | None] = each(None),
    weight: PerModel[float] = each(1.0),
    floor: float = 1e-6,
    normalize: bool = False,
) -> Combine:
    """Fisher merging: each weight of each model counts by its Fisher information there.

    Σ w_k (F_k + ε) W_k / Σ w_k (F_k + ε), where ε is the floor times the mean information of this tensor over all
    models: where no model knows anything it is the plain mean.

    Options:
        importance: a file of Fisher information for each model, as `isomerge calibrate --what fisher` writes it
        weight: how much each model's information counts
        floor: the least information of a weight, as a share of the tensor's mean
        normalize: divide each model's information by its mean over the tensor, so that no model counts more than others
    """
    if "importance" not in group.option_tensors:
        raise RequestError(NEEDED.format(name="fisher", tensor=group.name, option="importance"))
    if floor < 0:
        raise OptionError(f"fisher: the floor is {floor}; it must not be negative.", "floor")
    means = total(group, _information).reshape(-1) / max(1, group.elements)
    scales = torch.ones_like(means)
    if normalize:  # up to the largest; a model with next to nothing has no digits left that could be scaled
        scales = torch.where(means > NOTHING * means.max(), means.max() / means, 1.0)
    least = floor * float((means * scales).mean())
    merged = ewc(group, importance=importance, weight=weight)

    def combine(block: RowBlock) -> Tensor:
        information = block.option_tensors["importance"]
        if normalize:
            information = information * block.like(scales.tolist())
        return merged(replace(block, option_tensors={"importance": information + least}))

    return combine


def _information(block: RowBlock) -> Tensor:
    """(models,): the sum of each model's."""
    information = block.option_tensors["importance"]
    if bool((information < 0).any()) or not bool(information.isfinite().all()):
        raise RequestError("fisher: some of the information is negative or not finite. Measure it again.")
    return information.reshape(len(information), -1).sum(1, dtype=torch.float64)
