"""The weighted average."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def linear(tensors: Sequence[Tensor], *, weights: Sequence[float], normalize: bool = True) -> Tensor:
    """Weighted average: Σ w_k W_k, the weights divided by their sum unless `normalize` is false.

    >>> import torch
    >>> linear([torch.zeros(1), torch.ones(1)], weights=[1, 3])
    tensor([0.7500])

    Wortsman et al., "Model soups", 2022.
    """
    total = sum(weights) if normalize else 1.0
    result = tensors[0] * (weights[0] / total)
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        result += tensor * (weight / total)
    return result
