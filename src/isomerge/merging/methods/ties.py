"""Trim, elect signs, merge."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import largest
from isomerge.merging.methods.task_vectors import add_agreeing
from isomerge.merging.run.rows import Combine, TensorGroup


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
