"""Drop and rescale."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import bernoulli
from isomerge.merging.methods.task_vectors import Pruned, add_agreeing, add_all
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2311.03099")
def dare_linear(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop changes at random, scale up what is left, and add it all to the base.

    Options:
        weight: how much of each task vector
        density: with which probability a change is kept
        normalize: divide the weights by their sum
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take a bit an element here
        paper: rescale by 1/density, whatever was drawn
    """
    return add_all(_dropped(group, density, rescale, paper), weight, normalize, lambda_)


@method(base="required", reference="https://arxiv.org/abs/2311.03099")
def dare_ties(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop changes at random, scale up what is left, elect a sign for each weight, and add up those that agree with it.

    Options:
        weight: how much of each task vector, in the election and in the sum
        density: with which probability a change is kept
        normalize: divide by the weights of the models that agree
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take a bit an element here
        paper: rescale by 1/density, whatever was drawn
    """
    return add_agreeing(_dropped(group, density, rescale, paper), weight, normalize, lambda_)


def _dropped(group: TensorGroup, density: list[float], rescale: bool, paper: bool) -> Pruned:
    pruned = bernoulli(group, density, rescale and not paper)
    if rescale and paper:
        return Pruned(pruned.vectors, [1 / d if 0 < d < 1 else 1.0 for d in density])
    return pruned
