"""Task arithmetic."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each, method
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
