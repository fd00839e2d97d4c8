"""Isotropic merging: all directions of the merged change equally strong."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.matrices import joined, merge_matrices, singular
from isomerge.merging.methods.method import OptionError, method
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", whole=True, reference="https://arxiv.org/abs/2502.04959")
def iso_c(group: TensorGroup, *, lambda_: float = 1.0) -> Combine:
    """Add up the changes and give all their singular directions the mean singular value.

    Σ_k τ_k = U S Vᵀ; base + λ mean(S) U Vᵀ. Directions in which nothing changes are left alone. What is not one
    linear map (vectors, vocabularies) gets the mean change.

    Options:
        lambda: how much of the merged task vector is added to the base
    """

    def merge(vectors: Tensor) -> Tensor:
        left, values, right = singular(vectors.sum(dim=0))
        return left @ right * _mean(values)

    return merge_matrices(group, merge, lambda_)


@method(base="required", whole=True, reference="https://arxiv.org/abs/2502.04959")
def iso_cts(group: TensorGroup, *, common: float = 0.8, lambda_: float = 1.0) -> Combine:
    """As iso_c, with the weakest common directions replaced by each model's strongest own ones.

    Of the sum of changes the first directions are kept; each model adds its strongest directions outside them; all
    are made orthonormal together and get the mean of their singular values.

    Options:
        common: which share of the directions comes from the sum
        lambda: how much of the merged task vector is added to the base
    """
    if not 0 <= common <= 1:
        raise OptionError(f"a common share of {common} is not from 0 to 1.", "common")

    def merge(vectors: Tensor) -> Tensor:
        rank = min(vectors.shape[1:])
        own = round((rank - int(rank * common)) / len(vectors))
        shared = singular(vectors.sum(dim=0), max(0, rank - own * len(vectors)))
        outside = [vector - shared[0] @ (shared[0].T @ vector) for vector in vectors]
        rest = [singular(part, own, size=vector.norm()) for part, vector in zip(outside, vectors, strict=True)]
        left, values, right = joined([shared, *rest])
        return left @ right * _mean(values)

    return merge_matrices(group, merge, lambda_)


def _mean(values: Tensor) -> Tensor:
    return values.mean() if len(values) else torch.zeros((), dtype=values.dtype, device=values.device)
