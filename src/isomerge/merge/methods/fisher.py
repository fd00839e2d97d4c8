"""Fisher merging: elastic consolidation without a base, with a floor under the importances."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merge.group import Block, Combine, Group
from isomerge.merge.methods.ewc import NEEDED, ewc
from isomerge.merge.methods.method import PerModel, each, method
from isomerge.merge.reduce import total


@method(reference="https://arxiv.org/abs/2111.09832")
def fisher(
    group: Group,
    *,
    importance: PerModel[str | None] = each(None),
    weight: PerModel[float] = each(1.0),
    floor: float = 1e-6,
) -> Combine:
    """Fisher merging: each weight of each model counts by its Fisher information there.

    Σ w_k (F_k + ε) W_k / Σ w_k (F_k + ε), where ε is the floor times the mean information of this tensor over all
    models: where no model knows anything it is the plain mean.

    Options:
        importance: a file of Fisher information for each model, as `isomerge calibrate --what fisher` writes it
        weight: how much each model's information counts
        floor: the least information of a weight, as a share of the tensor's mean
    """
    if "importance" not in group.extras:
        raise RequestError(NEEDED.format(name="fisher", tensor=group.name, option="importance"))
    if floor < 0:
        raise RequestError(f"fisher: the floor is {floor}; it must not be negative.")
    least = floor * float(total(group, _information)) / max(1, group.elements * group.models)
    merged = ewc(group, importance=importance, weight=weight)

    def combine(block: Block) -> Tensor:
        return merged(replace(block, extras={"importance": block.extras["importance"] + least}))

    return combine


def _information(block: Block) -> Tensor:
    found = block.extras["importance"]
    if bool((found < 0).any()) or not bool(found.isfinite().all()):
        raise RequestError("fisher: some of the information is negative or not finite. Measure it again.")
    return found.sum(dtype=torch.float64)
