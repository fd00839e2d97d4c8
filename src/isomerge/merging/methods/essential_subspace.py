"""The directions in which the changes move the outputs most, as inputs of each model's own task show them."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.singular_vectors import singular
from isomerge.merging.methods.task_vectors import add_all, task_vectors, unpruned
from isomerge.merging.run.rows import Combine, GramSource, TensorGroup, gram_option

FLATTER = 0.15  # the power of an eigenvalue by which its direction counts
STRONGER = 2  # the power of a model's or an input's relative size by which it counts
DOUBLED = 2  # as in the authors' program


@method(base="required", whole=True, reference="https://arxiv.org/abs/2602.20208")
@gram_option("statistics")
def esm(group: TensorGroup, *, statistics: PerModel[str | None] = each(None), lambda_: float = 1.0) -> Combine:
    """Merge the changes in the directions that move each model's outputs most on its own inputs (ESM).

    P_k are the first r/K eigenvectors of τ_k G_k τ_kᵀ with eigenvalues e, G_k = Σ x xᵀ over the inputs of model k.
    P_k and P_kᵀτ_k are scaled by e^0.15 relative to its mean, P_kᵀτ_k also by (‖τ_k‖ / mean)². P = [P_1 … P_K] and
    A = [P_1ᵀτ_1; …], whose columns are scaled by their squared relative lengths; base + 2 λ · the nearest orthonormal
    matrices to P and A, each times its mean singular value. What no statistics are of gets the mean change.

    Options:
        statistics: a file of Gram matrices for each model, as `isomerge calibrate --what gram` writes it
        lambda: how much of the merged task vector is added to the base
    """
    if "statistics" not in group.grams:
        raise RequestError(
            f"esm needs Gram matrices of the models' inputs, and none were given for '{group.name}'. Measure each "
            "model with isomerge calibrate and name the files with 'statistics'."
        )
    grams = group.grams["statistics"]
    block = group.whole()
    vectors = task_vectors(block)
    if not grams or not bool(vectors.any()):
        return add_all(unpruned(group.models), [1.0] * group.models, True, lambda_)
    transposed = grams[0].transposed
    matrices = (vectors.mT if transposed else vectors.flatten(2)).double()
    size = matrices.abs().amax()
    merged = _merged(matrices / size, grams) * (size * DOUBLED * lambda_)
    result = (merged.mT if transposed else merged).reshape(group.shape)
    return group.rows_of(block.onto_base(result.to(block.tensors.dtype)))


def _merged(vectors: Tensor, grams: list[GramSource]) -> Tensor:
    count = max(1, vectors.shape[1] // len(vectors))
    norms = vectors.flatten(1).norm(dim=1)
    bases, coordinates = [], []
    for vector, gram, norm in zip(vectors, grams, norms, strict=True):
        directions, strength = _principal(vector, gram.read().to(vector), count)
        bases.append(directions * strength)
        coordinates.append(strength[:, None] * (directions.T @ vector) * (norm / norms.mean()) ** STRONGER)
    coordinate = torch.cat(coordinates)
    lengths = coordinate.norm(dim=0)
    if lengths.any():
        coordinate = coordinate * (lengths / lengths.mean()) ** STRONGER
    return _evened(torch.cat(bases, dim=1)) @ _evened(coordinate)


def _principal(vector: Tensor, gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first eigenvectors of the outputs' shift, without those that are rounding only, and how much each counts."""
    shift = vector @ gram @ vector.T
    values, directions = torch.linalg.eigh((shift + shift.T) / 2)
    values, directions = values.flip(0)[:count], directions.flip(1)[:, :count]
    real = values > values[0].clamp_min(0) * len(shift) * torch.finfo(values.dtype).eps
    values, directions = values[real], directions[:, real]
    strength = (values / values.mean()) ** FLATTER
    return directions, strength / strength.mean()


def _evened(matrix: Tensor) -> Tensor:
    """With all singular values at their mean."""
    left, values, right = singular(matrix)
    evened: Tensor = left @ right * (values.mean() if len(values) else 0.0)
    return evened
