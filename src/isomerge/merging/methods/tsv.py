"""Task singular vectors."""

from __future__ import annotations

from torch import Tensor

from isomerge.merging.methods.matrices import joined, merge_matrices, singular
from isomerge.merging.methods.method import OptionError, method
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", whole=True, reference="https://arxiv.org/abs/2412.00081")
def tsv(group: TensorGroup, *, share: float | None = None, lambda_: float = 1.0) -> Combine:
    """Keep the strongest singular directions of each model's change and make those of all models orthogonal.

    τ_k ≈ U_k S_k V_kᵀ with a share of the rank; base + λ U S Vᵀ, U and V the nearest orthonormal matrices to
    [U_1 … U_K] and [V_1 … V_K]. What is not one linear map (vectors, vocabularies) gets the mean change.

    Options:
        share: which share of the singular directions of each model is kept; none is 1/K
        lambda: how much of the merged task vector is added to the base
    """
    part = 1 / group.models if share is None else share
    if not 0 < part <= 1:
        raise OptionError(f"a share of {part} of the singular directions is not above 0 and up to 1.", "share")

    def merge(vectors: Tensor) -> Tensor:
        count = max(1, int(min(vectors.shape[1:]) * part))
        left, values, right = joined([singular(vector, count) for vector in vectors])
        return left * values @ right

    return merge_matrices(group, merge, lambda_)
