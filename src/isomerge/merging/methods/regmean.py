"""Regression mean: linear maps are averaged by what their inputs look like, everything else plainly."""

from __future__ import annotations

import warnings

from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.reduce import mixture
from isomerge.merging.run.rows import Combine, TensorGroup, gram_option
from isomerge.merging.statistics.regression import regression_mean
from isomerge.merging.statistics.warning import StatisticsWarning, too_little


@method(reference="https://arxiv.org/abs/2212.09849", whole=True)
@gram_option("statistics")
def regmean(
    group: TensorGroup,
    *,
    statistics: PerModel[str | None] = each(None),
    weight: PerModel[float] = each(1.0),
    alpha: float = 0.9,
) -> Combine:
    """Regression mean: the linear maps that make of every model's inputs what that model made of them.

    W = (Σ w_k G_k)⁻¹ Σ w_k G_k W_k with G_k = X_kᵀX_k, off its diagonal times α; the weighted mean for every tensor
    that is not the weight of a linear map (biases, norms, embeddings).

    Options:
        statistics: a file of Gram matrices for each model, as `isomerge calibrate --what gram` writes it
        weight: how much each model's data count
        alpha: what off-diagonal entries are multiplied by; 1 is plain regression, 0 weighs each input by its size
    """
    if "statistics" not in group.grams:
        raise RequestError(
            f"regmean needs Gram matrices of the models' inputs, and none were given for '{group.name}'. Measure each "
            "model with isomerge calibrate and name the files with 'statistics'."
        )
    grams = group.grams["statistics"]
    if not grams:
        return mixture([share / (sum(weight) or 1.0) for share in weight])
    transposed = grams[0].transposed
    matrices = [_matrix(tensor, transposed) for tensor in group.whole().tensors]
    solved = regression_mean(matrices, [gram.read().to(group.device) for gram in grams], weight, alpha=alpha)
    problem = too_little(group.name, sum(g.count for g in grams), matrices[0].shape[1], solved.ridge, alpha)
    if problem:
        warnings.warn(problem, StatisticsWarning, stacklevel=2)
    result = solved.weight.T if transposed else solved.weight
    return group.rows_of(result.reshape(group.shape).to(group.dtype))


def _matrix(tensor: Tensor, transposed: bool) -> Tensor:
    """As (out, in)."""
    return tensor.T if transposed else tensor.flatten(1)
