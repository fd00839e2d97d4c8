"""DELLA: drop at random, the smaller the likelier."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging import random_numbers
from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.pruning import at_random
from isomerge.merging.methods.task_vectors import Pruned, add_agreeing, add_all
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2406.11617")
def della(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    epsilon: PerModel[float] = each(0.15),
    normalize: bool = True,
    rescale: bool = True,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop changes at random, small ones likelier, scale up the rest, elect a sign, and average those that agree.

    Options:
        weight: how much of each task vector, in the election and in the average
        density: the mean probability with which a change is kept
        epsilon: the smallest change of a row is kept with density − epsilon, the largest with density + epsilon
        normalize: divide by the weights of the models that agree
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take a bit an element here
        paper: rescale each change by the inverse of its own probability
    """
    return add_agreeing(_dropped(group, density, epsilon, rescale, paper), weight, normalize, lambda_)


@method(base="required", reference="https://arxiv.org/abs/2406.11617")
def della_linear(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    epsilon: PerModel[float] = each(0.15),
    normalize: bool = False,
    rescale: bool = True,
    lambda_: float = 1.0,
    int8_mask: bool = False,
    paper: bool = False,
) -> Combine:
    """Drop changes at random, small ones likelier, scale up the rest, and add it all to the base.

    Options:
        weight: how much of each task vector
        density: the mean probability with which a change is kept
        epsilon: the smallest change of a row is kept with density − epsilon, the largest with density + epsilon
        normalize: divide the weights by their sum
        rescale: multiply what is kept until the sum of magnitudes is what it was
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take a bit an element here
        paper: rescale each change by the inverse of its own probability
    """
    return add_all(_dropped(group, density, epsilon, rescale, paper), weight, normalize, lambda_)


def _dropped(group: TensorGroup, density: list[float], epsilon: list[float], rescale: bool, paper: bool) -> Pruned:
    for d, e in zip(density, epsilon, strict=True):
        if 0 < d < 1 and not 0 < d - e <= d + e < 1:
            raise OptionError(
                f"density {d} and epsilon {e} make probabilities outside (0, 1). "
                f"Give an epsilon from 0 to below {min(d, 1 - d):.3g}.",
                "density",
                "epsilon",
            )

    def likelihood(block: RowBlock, model: int) -> Tensor:
        spread = ranks(block.deltas[model].abs()).to(group.dtype)
        return spread.mul_(2 * epsilon[model]).add_(density[model] - epsilon[model])

    def draw(block: RowBlock, model: int) -> Tensor:
        return random_numbers.uniform(group, block, model) < likelihood(block, model)

    pruned = at_random(group, density, draw, rescale and not paper)

    def rescaled(block: RowBlock) -> Tensor:
        vectors = pruned.vectors(block)
        for model, d in enumerate(density):
            if 0 < d < 1:
                vectors[model].div_(likelihood(block, model))
        return vectors

    return Pruned(rescaled, pruned.scale) if rescale and paper else pruned


def ranks(numbers: Tensor) -> Tensor:
    """The place of each number among those of its row (axis 1), from 0 for the smallest to 1; 0.5 for a lone one."""
    table = numbers.reshape(1, -1) if numbers.dim() < 2 else numbers
    width = table.shape[1]
    if width < 2:
        return torch.full(numbers.shape, 0.5, device=numbers.device)
    order = table.argsort(dim=1, stable=True)
    steps = torch.arange(width, device=numbers.device, dtype=torch.float32).div_(width - 1)
    steps = steps.reshape(1, -1, *[1] * (table.dim() - 2)).expand(table.shape)
    return torch.empty(table.shape, device=numbers.device).scatter_(1, order, steps).reshape(numbers.shape)
