"""Whoever started the interference should end it."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.matrices import merge_matrices
from isomerge.merging.methods.method import method
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", whole=True, reference="https://arxiv.org/abs/2503.08099")
def wudi(group: TensorGroup, *, lambda_: float = 1.0) -> Combine:
    """The change that interferes least with every model's: min Σ_k ‖(τ − τ_k) τ_kᵀ‖² / ‖τ_k‖².

    The rows of τ_k span the inputs model k has learned from, so this asks for agreement on those. The minimum is
    τ = (Σ τ_k τ_kᵀτ_k / ‖τ_k‖²) (Σ τ_kᵀτ_k / ‖τ_k‖²)⁺. What is not one linear map gets the mean change.

    Options:
        lambda: how much of the merged task vector is added to the base
    """
    return merge_matrices(group, _least_interference, lambda_)


def _least_interference(vectors: Tensor) -> Tensor:
    """In float64, because squares lose half the digits; without the directions that no model has changed."""
    columns = vectors.shape[2]
    wanted = torch.zeros(vectors.shape[1:], dtype=torch.float64, device=vectors.device)
    inputs = torch.zeros(columns, columns, dtype=torch.float64, device=vectors.device)
    for vector in vectors.double():
        size = vector.square().sum()
        if size > 0:
            covariance = vector.T @ vector / size
            inputs += covariance
            wanted += vector @ covariance
    values, basis = torch.linalg.eigh(inputs)
    real = values > values[-1] * columns * torch.finfo(torch.float64).eps
    merged: Tensor = wanted @ basis[:, real] / values[real] @ basis[:, real].T
    return merged.to(vectors.dtype)
