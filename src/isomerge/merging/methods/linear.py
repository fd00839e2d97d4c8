"""The weighted average."""

from __future__ import annotations

from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.reduce import mixture
from isomerge.merging.run.rows import Combine, TensorGroup


@method(reference="https://arxiv.org/abs/2203.05482")
def linear(group: TensorGroup, *, weight: PerModel[float] = each(1.0), normalize: bool = True) -> Combine:
    """Weighted average: Σ w_k W_k, the weights divided by their sum.

    Options:
        weight: how much of each model
        normalize: divide the weights by their sum
    """
    total = sum(weight) if normalize else 1.0
    if abs(total) < 1e-12:
        raise OptionError(
            f"the weights {weight} add up to zero. Give others, or normalize: false.", "weight", "normalize"
        )
    return mixture([w / total for w in weight])
