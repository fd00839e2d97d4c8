"""What methods on whole matrices share: when a tensor is a matrix, its singular vectors, and joining them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isomerge.merging.methods.task_vectors import add_all, task_vectors, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup

SLENDER = 12  # longer by more than this than it is wide: an embedding, or stacked experts, not one linear map

Merge = Callable[[Tensor], Tensor]
"""(models, out, in) task vectors → the merged one (out, in)."""


def merge_matrices(group: TensorGroup, merge: Merge, lambda_: float) -> Combine:
    """Base + λ · merge(task vectors) for matrices; base + λ · mean for what is not one linear map: vectors, scalars,
    vocabularies. A tensor of more axes is a matrix of its first axis by all the others."""
    rows = group.shape[0] if len(group.shape) > 1 else 1
    columns = group.elements // rows if rows else 0
    if min(rows, columns) < 2 or max(rows, columns) > SLENDER * min(rows, columns):
        return add_all(unpruned(group.models), [1.0] * group.models, True, lambda_)
    block = group.whole()
    vectors = task_vectors(block).reshape(group.models, rows, columns)
    # One scale for all: products of very large or very small numbers stay in range.
    size = vectors.abs().amax()
    if size == 0:
        return group.rows_of(block.onto_base(torch.zeros_like(block.tensors[0])))
    merged = merge(vectors.div_(size)).mul_(size * lambda_).reshape(group.shape)
    return group.rows_of(block.onto_base(merged))


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
