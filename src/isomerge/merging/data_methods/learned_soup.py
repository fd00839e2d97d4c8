"""Learned soup (Wortsman et al. 2022, arXiv 2203.05482): the shares of an average, by gradient on labelled data.

    min over λ of (1 − p) L(W(λ); x) + p L(W(λ); x + δ),    W(λ) = Σ_k λ_k W_k,  λ_k > 0,  Σ_k λ_k = 1

With a base the coefficients are of the changes, W(λ) = base + Σ_k λ_k (W_k − base), and free. With p > 0 the data count
also with the perturbations δ that hurt most: adversarial soups (Croce et al. 2023, arXiv 2302.10164) choose their
coefficients for inputs of several kinds.
"""

from __future__ import annotations

from isomerge.errors import RequestError
from isomerge.merging.coefficient_objectives import LabelLoss
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.learned_coefficients import CoefficientMerge
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, Share, each


@data_method(
    data="one",
    passes="the merged model once per step, with gradients",
    labels=True,
    base="optional",
    reference="https://arxiv.org/abs/2203.05482",
)
def learned_soup(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    by: str = "model",
    steps: int = 100,
    rate: float = 0.1,
    perturbed: Share = 0.0,
    radius: float = 0.1,
    attack: int = 5,
) -> MergedWeights:
    """Learn how much of each model, by gradient on labelled data.

    Options:
        weight: the first coefficients; without a base divided by their sum
        by: what has coefficients of its own: model (one for each model), layer, or tensor
        steps: gradient steps, each on one batch
        rate: size of the first steps of a coefficient (of its logarithm, without a base)
        perturbed: how much of the loss is that on perturbed inputs; for images
        radius: the largest change of an input number
        attack: gradient steps that look for the perturbation
    """
    if attack < 1 or not radius >= 0:
        raise RequestError(
            f"learned_soup: attack is {attack} and radius {radius}. Use at least one step and a radius from 0.",
            keys=("attack", "radius"),
        )
    merge = CoefficientMerge(inputs, weight, by, labels=True)
    learned = merge.learn(LabelLoss.of(inputs, merge.config, perturbed, radius, attack), steps, rate)
    return merge.result({"kind": "loss", **learned})
