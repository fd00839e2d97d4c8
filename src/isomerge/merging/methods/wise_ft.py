"""Between the base and what was fine-tuned from it."""

from __future__ import annotations

from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.task_vectors import add_all, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup


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
