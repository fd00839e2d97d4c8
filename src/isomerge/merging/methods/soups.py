"""Soups: plain averages with rules for the weights."""

from __future__ import annotations

from isomerge.merging.methods.method import OptionError, PerModel, method
from isomerge.merging.methods.reduce import mixture
from isomerge.merging.run.rows import Combine, TensorGroup


@method(reference="https://arxiv.org/abs/2203.05482")
def uniform_soup(group: TensorGroup) -> Combine:
    """The mean of all models: Σ W_k / K."""
    return mixture([1 / group.models] * group.models)


@method(reference="https://arxiv.org/abs/2306.04488")
def rewarded_soup(group: TensorGroup, *, weight: PerModel[float]) -> Combine:
    """Models trained on different rewards, mixed by how much each reward matters: Σ w_k W_k with Σ w_k = 1, w_k ≥ 0.

    Options:
        weight: the preference for each model's reward; they add up to 1
    """
    if abs(sum(weight) - 1) > 1e-6 or min(weight) < 0:
        raise OptionError(
            f"the weights of rewarded_soup are preferences, not negative and adding up to 1, but {weight} add up to "
            f"{sum(weight):g}. Correct them, or use linear, which divides by the sum.",
            "weight",
        )
    return mixture(weight)
