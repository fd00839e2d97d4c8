"""Methods on whole matrices: singular vectors of the changes, made isotropic, orthogonal, or free of interference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from isomerge.merging.methods.method import OptionError, method
from isomerge.merging.methods.task_vectors import add_all, task_vectors, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup, rows_of

SLENDER = 12  # longer by more than this than it is wide: an embedding, or stacked experts, not one linear map

Merge = Callable[[Tensor], Tensor]
"""(models, out, in) task vectors → the merged one (out, in)."""


def merge_matrices(group: TensorGroup, merge: Merge, lambda_: float) -> Combine:
    """Base + λ · merge(task vectors) for matrices; base + λ · mean for what is not one linear map: vectors, scalars,
    vocabularies. A tensor of more axes is a matrix of its first axis by all the others."""
    if not is_linear_map(group):
        return add_all(unpruned(group.models), [1.0] * group.models, True, lambda_)
    block = group.whole()
    vectors = task_vectors(block).reshape(group.models, group.shape[0], -1)
    # One scale for all: products of very large or very small numbers stay in range.
    size = vectors.abs().amax()
    if size == 0:
        return group.rows_of(block.onto_base(torch.zeros_like(block.tensors[0])))
    merged = merge(vectors.div_(size)).mul_(size * lambda_).reshape(group.shape)
    return group.rows_of(block.onto_base(merged))


def is_linear_map(group: TensorGroup) -> bool:
    """A matrix, or what can be seen as one, that is not a vector, a vocabulary or a stack of experts."""
    rows, columns = rows_of(group.shape)
    return min(rows, columns) >= 2 and max(rows, columns) <= SLENDER * min(rows, columns)


def singular(matrix: Tensor, count: int | None = None, size: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values with their vectors (out, r), (r), (r, in), without those that are rounding only:
    of the matrix itself, or of one of the given size from which it was computed."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rounding = (values[:1] if size is None else size) * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    r = min(int((values > rounding).sum()), len(values) if count is None else count)
    return left[:, :r], values[:r], right[:r]


def orthonormal(columns: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (the polar factor), on the space the columns span."""
    left, _, right = singular(columns)
    return left @ right


def joined(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors of several matrices side by side, made orthonormal together, with all their values."""
    left = orthonormal(torch.cat([part[0] for part in parts], dim=1))
    right = orthonormal(torch.cat([part[2] for part in parts]).T).T
    return left, torch.cat([part[1] for part in parts]), right


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


@method(base="required", whole=True, reference="https://arxiv.org/abs/2503.08099")
def wudi(group: TensorGroup, *, normalize: bool = True, lambda_: float = 1.0) -> Combine:
    """The change that interferes least with every model's: min Σ_k ‖(τ − τ_k) τ_kᵀ‖² / ‖τ_k‖².

    The rows of τ_k span the inputs model k has learned from, so this asks for agreement on those. The minimum is
    τ = (Σ τ_k τ_kᵀτ_k / ‖τ_k‖²) (Σ τ_kᵀτ_k / ‖τ_k‖²)⁺. What is not one linear map gets the mean change.

    Options:
        normalize: divide by ‖τ_k‖², so that large changes count no more than small ones
        lambda: how much of the merged task vector is added to the base
    """
    return merge_matrices(group, partial(_least_interference, normalize=normalize), lambda_)


def _least_interference(vectors: Tensor, normalize: bool) -> Tensor:
    """In float64, because squares lose half the digits; without the directions that no model has changed."""
    columns = vectors.shape[2]
    wanted = torch.zeros(vectors.shape[1:], dtype=torch.float64, device=vectors.device)
    inputs = torch.zeros(columns, columns, dtype=torch.float64, device=vectors.device)
    for vector in vectors.double():
        size = vector.square().sum()
        if size > 0:
            covariance = vector.T @ vector / (size if normalize else 1.0)
            inputs += covariance
            wanted += vector @ covariance
    values, basis = torch.linalg.eigh(inputs)
    real = values > values[-1] * columns * torch.finfo(torch.float64).eps
    merged: Tensor = wanted @ basis[:, real] / values[real] @ basis[:, real].T
    return merged.to(vectors.dtype)
