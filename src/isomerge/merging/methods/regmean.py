"""Regression mean: linear maps are averaged by what their inputs look like, everything else plainly."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.methods.block_sums import mixture
from isomerge.merging.methods.method import PerModel, Share, each, method
from isomerge.merging.regression import StatisticsWarning, regression_mean, shortage_warning, with_column_of_ones
from isomerge.merging.run.rows import Combine, GramSource, TensorGroup, gram_option


@method(reference="https://arxiv.org/abs/2212.09849", whole=True)
@gram_option("statistics")
def regmean(
    group: TensorGroup,
    *,
    statistics: PerModel[str | None] = each(None),
    weight: PerModel[float] = each(1.0),
    alpha: Share = 0.9,
    solve_biases: bool = False,
) -> Combine:
    """Regression mean: the linear maps that make of every model's inputs what that model made of them.

    W = (Σ w_k G_k)⁻¹ Σ w_k G_k W_k with G_k = X_kᵀX_k, off its diagonal times α; the weighted mean for every tensor
    that is not the weight of a linear map (biases, norms, embeddings).

    Options:
        statistics: a file of Gram matrices for each model, as `isomerge calibrate --what gram` writes it
        weight: how much each model's data count
        alpha: what off-diagonal entries are multiplied by; 1 is plain regression, 0 weighs each input by its size
        solve_biases: solve each bias together with its weight, as the weight of an input that is always 1
    """
    if "statistics" not in group.grams:
        raise RequestError(
            f"regmean needs Gram matrices of the models' inputs, and none were given for '{group.name}'. Measure each "
            "model with isomerge calibrate and name the files with 'statistics'."
        )
    grams = group.grams["statistics"]
    if not grams:
        return mixture([share / (sum(weight) or 1.0) for share in weight])
    transposed, with_bias = grams[0].transposed, all(gram.other is not None for gram in grams)
    matrices = [_with_bias(tensor, gram) if with_bias else _matrix(tensor, transposed)
                for tensor, gram in zip(group.whole().tensors, grams, strict=True)]  # fmt: skip
    products = [
        with_column_of_ones(gram.read(), gram.read_total(), gram.count) if with_bias else gram.read() for gram in grams
    ]
    solved = regression_mean(matrices, [product.to(group.device) for product in products], weight, alpha=alpha)
    problem = shortage_warning(group.name, sum(g.count for g in grams), matrices[0].shape[1], solved.ridge, alpha)
    if problem and not grams[0].is_bias:  # said of the weight already
        warnings.warn(problem, StatisticsWarning, stacklevel=2)
    result = solved.weight
    if with_bias:
        result = result[:, -1] if grams[0].is_bias else result[:, :-1]
    result = result.T if transposed and not grams[0].is_bias else result
    return group.rows_of(result.reshape(group.shape).to(group.dtype))


def _matrix(tensor: Tensor, transposed: bool) -> Tensor:
    """As (out, in)."""
    return tensor.T if transposed else tensor.flatten(1)


def _with_bias(tensor: Tensor, gram: GramSource) -> Tensor:
    """A weight with its bias as one more column, whichever of the two `tensor` is."""
    assert gram.other is not None
    other = gram.other.rows(0, gram.other.info.shape[0]).to(tensor.device, torch.float64)
    weight, bias = (other, tensor) if gram.is_bias else (tensor, other)
    matrix = _matrix(weight.double(), gram.transposed)
    if bias.numel() != len(matrix):
        raise RequestError(
            f"regmean: {gram.other.label} and {gram.label} are of {bias.numel()} and {len(matrix)} outputs, so they "
            "cannot be solved together. Leave out solve_biases, or merge without a new tokenizer."
        )
    return torch.cat([matrix, bias.double().reshape(-1, 1)], dim=1)
