"""A middle that one odd model cannot drag away."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from isomerge.merging.methods.block_sums import mixture, products, total
from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(reference="https://arxiv.org/abs/1912.13445")
def geometric_median(
    group: TensorGroup, *, weight: PerModel[float] = each(1.0), max_iter: int = 1000, tol: float = 1e-9
) -> Combine:
    """The point with the least sum of distances to the models, in each tensor: min Σ w_k ‖W − W_k‖.

    It is a mean Σ c_k W_k whose shares are found by Weiszfeld's iteration, c_k ∝ w_k / ‖W − W_k‖, on the models' inner
    products.

    Options:
        weight: how much each model's distance counts
        max_iter: how many steps at most
        tol: stop when no share changes by more
    """
    if min(weight) < 0 or max(weight) <= 0:
        raise OptionError(f"the weights {weight} of distances are not negative, and one is above 0.", "weight")
    middle = total(group, lambda block: products(_from_their_mean(block)))
    return mixture(_shares(np.atleast_2d(middle.numpy()), np.array(weight, dtype=np.float64), max_iter, tol).tolist())


def _from_their_mean(block: RowBlock) -> list[Tensor]:
    return list((block.tensors - block.tensors.mean(0)).reshape(len(block.tensors), -1))


def _shares(gram: np.ndarray, weight: np.ndarray, max_iter: int, tol: float) -> np.ndarray:
    """`gram` has the inner products of the models' distances from their mean; without a block it is one zero."""
    shares: np.ndarray = weight / weight.sum()
    nearest = tol * np.sqrt(max(gram.diagonal().max(), 0.0))  # on a model itself the iteration would divide by zero
    if not nearest > 0:
        return shares
    away = np.eye(len(weight))
    for _ in range(max_iter):
        to_models = away - shares
        distances = np.sqrt(np.maximum(np.einsum("ki,ij,kj->k", to_models, gram, to_models), 0))
        pull = weight / np.maximum(distances, nearest)
        before, shares = shares, pull / pull.sum()
        if np.abs(shares - before).max() < tol:
            break
    return shares
