"""The orthogonal part of what fine-tuning did, averaged as rotations and not as matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import method
from isomerge.merging.methods.singular_vectors import is_linear_map
from isomerge.merging.methods.task_vectors import add_all, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup

NEARLY = 1e-9  # of the size of W_k W₀ᵀ: towards no rotation where the weights do not say


@method(base="required", whole=True, reference="https://arxiv.org/abs/2602.05943")
def ortho_merge(group: TensorGroup, *, lambda_: float = 1.0) -> Combine:
    """Average the rotations that bring the base nearest to each model, and add the mean of what no rotation explains.

    R_k = argmin ‖R W₀ − W_k‖ over rotations, A_k = (R_k + 1)⁻¹ (R_k − 1), A = Σ A_k · mean ‖A_k‖ / ‖Σ A_k‖;
    (1 − A)⁻¹ (1 + A) W₀ + λ mean (W_k − R_k W₀), on the shorter side of the matrix. What is not one linear map
    (vectors, vocabularies) gets the mean change.

    Options:
        lambda: how much of the mean residual is added
    """
    if not is_linear_map(group):
        return add_all(unpruned(group.models), [1.0] * group.models, True, lambda_)
    block = group.whole()
    rows = group.shape[0]
    models = block.tensors.reshape(group.models, rows, -1).double()
    base = block.tensors[0].new_zeros(()) if block.base is None else block.base
    base = base.reshape(rows, -1).double()
    if rows > base.shape[1]:
        merged = _merged(models.mT, base.T, lambda_).T
    else:
        merged = _merged(models, base, lambda_)
    return group.rows_of(merged.reshape(group.shape).to(block.tensors.dtype))


def _merged(models: Tensor, base: Tensor, lambda_: float) -> Tensor:
    rotations = torch.stack([_nearest_rotation(model @ base.T) for model in models])
    one = torch.eye(len(base), dtype=base.dtype, device=base.device)
    turns = torch.linalg.solve(rotations + one, rotations - one)
    turns = (turns - turns.mT) / 2
    together = turns.sum(0)
    length = together.norm()
    strength = torch.stack([turn.norm() for turn in turns]).mean()
    turn = together * (strength / length) if length > 1e-12 * strength else torch.zeros_like(together)
    rotated: Tensor = torch.linalg.solve(one - turn, (one + turn) @ base)
    return rotated + lambda_ * (models - rotations @ base).mean(0)


def _nearest_rotation(matrix: Tensor) -> Tensor:
    """With determinant 1: a reflection is no turn that could be averaged."""
    one = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    size = matrix.norm()
    left, _, right = torch.linalg.svd(matrix / size + NEARLY * one if size > 0 else one)
    left[:, -1] *= torch.linalg.det(left @ right).sign()
    rotation: Tensor = left @ right
    return rotation
