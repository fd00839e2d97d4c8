"""Model breadcrumbs: without the outliers and without the noise."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import middle
from isomerge.merging.methods.task_vectors import add_agreeing, add_all
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2312.06795")
def breadcrumbs(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    gamma: PerModel[float] = each(0.01),
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop the very largest and the smallest changes of each model and add the rest to the base.

    Options:
        weight: how much of each task vector
        density: which share of each task vector is kept
        gamma: which share is dropped as outliers, the largest first
        normalize: divide the weights by their sum
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take no memory here
        paper: drop the outliers always, even where density and gamma add up to more than 1
    """
    return add_all(middle(group, density, gamma, rescale, strict=paper), weight, normalize, lambda_)


@method(base="required", reference="https://arxiv.org/abs/2312.06795")
def breadcrumbs_ties(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    gamma: PerModel[float] = each(0.01),
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop the very largest and the smallest changes of each model, elect a sign for each weight, and add what agrees.

    Options:
        weight: how much of each task vector, in the election and in the sum
        density: which share of each task vector is kept
        gamma: which share is dropped as outliers, the largest first
        normalize: divide by the weights of the models that agree
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take no memory here
        paper: drop the outliers always, even where density and gamma add up to more than 1
    """
    return add_agreeing(middle(group, density, gamma, rescale, strict=paper), weight, normalize, lambda_)
