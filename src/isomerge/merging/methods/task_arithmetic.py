"""Task vectors added up: all of them, or from a base towards their mean."""

from __future__ import annotations

from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.task_vectors import add_all, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2212.04089")
def task_arithmetic(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    normalize: bool = False,
    rescale: bool = False,
    lambda_: float = 1.0,
    int8_mask: bool = False,
) -> Combine:
    """Add what each model learned to the base: base + λ Σ w_k (W_k − base).

    Options:
        weight: how much of each task vector
        density: accepted for recipes of other tools; nothing is dropped here
        normalize: divide the weights by their sum
        rescale: accepted for recipes of other tools; nothing is dropped, so nothing is rescaled
        lambda: how much of the merged task vector is added to the base
        int8_mask: accepted for recipes of other tools; masks take no memory here
    """
    return add_all(unpruned(group.models), weight, normalize, lambda_)


def interpolate(group: TensorGroup, *, alpha: float = 0.5, weight: PerModel[float] = each(1.0)) -> Combine:
    """From the base (alpha = 0) in a straight line to the model or the models' weighted mean (alpha = 1).

    Options:
        alpha: where on the line
        weight: how much of each model, divided by their sum
    """
    if abs(sum(weight)) < 1e-8:
        raise OptionError(f"the weights {weight} add up to zero. Give others.", "weight")
    return add_all(unpruned(group.models), weight, True, alpha)


wise_ft = method(base="required", name="wise_ft", reference="https://arxiv.org/abs/2109.01903")(interpolate)
paint = method(base="required", name="paint", reference="https://arxiv.org/abs/2208.05592")(interpolate)
