"""Methods on whole matrices that ask where the changes of several models share singular directions."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import OptionError, method
from isomerge.merging.methods.singular_vectors import merge_matrices, orthonormal, singular
from isomerge.merging.methods.task_vectors import agreeing
from isomerge.merging.run.rows import Combine, TensorGroup


@method(base="required", whole=True, reference="https://arxiv.org/abs/2602.05536")
def svc(group: TensorGroup, *, alpha: float = 1.0, lambda_: float = 1.0) -> Combine:
    """Add up the changes and shrink the singular directions that several models count again (SVC).

    Σ τ_k = U S Vᵀ; along u_r the sum is a_r = u_rᵀ Σ τ_k and a model's part a_rk = u_rᵀ τ_k. The singular value becomes
    s_r K / Σ_k max(α, ⟨a_r, a_rk⟩ / ‖a_rk‖²), so what all models have learned is counted once. What is not one linear
    map (vectors, vocabularies) gets the mean change.

    Options:
        alpha: the least that a model counts in the divisor; with 1 nothing grows
        lambda: how much of the merged task vector is added to the base
    """
    if not alpha > 0:
        raise OptionError(f"an alpha of {alpha} would divide by nothing; it is above 0.", "alpha")

    def merge(vectors: Tensor) -> Tensor:
        left, values, right = singular(vectors.sum(dim=0))
        parts = left.T @ vectors  # (models, r, in)
        whole = values[:, None] * right
        sizes = parts.square().sum(-1)
        counted = torch.where(sizes > 0, (parts * whole).sum(-1) / sizes, 0.0).clamp_min(alpha)
        return left * (values * len(vectors) / counted.sum(0)) @ right

    return merge_matrices(group, merge, lambda_)


@method(base="required", whole=True, reference="https://arxiv.org/abs/2603.06242")
def dc_merge(group: TensorGroup, *, smooth: bool = True, density: float | None = None, lambda_: float = 1.0) -> Combine:
    """Merge the changes in one basis that has room for the strongest directions of each model (DC-Merge).

    τ_k ≈ U_k S_k V_kᵀ of rank r / K, S_k made even; Ū and V̄ are the nearest orthonormal matrices to [U_1 … U_K] and
    [V_1 … V_K]. Of M_k = Ūᵀ τ_k V̄ the largest entries stay, those that agree on a sign are averaged, and of the result
    M the blocks on the diagonal, one for each model: base + λ Ū M V̄ᵀ. What is not one linear map gets the mean change.

    Options:
        smooth: give the kept directions of a model their mean strength
        density: which share of the entries of each M_k is kept; none is as many as there are directions
        lambda: how much of the merged task vector is added to the base
    """

    def merge(vectors: Tensor) -> Tensor:
        count = max(1, min(vectors.shape[1:]) // len(vectors))
        parts = [singular(vector, count) for vector in vectors]
        left = orthonormal(torch.cat([part[0] for part in parts], dim=1))
        right = orthonormal(torch.cat([part[2] for part in parts]).T).T
        common = torch.stack([left.T @ ((u * (_even(s) if smooth else s)) @ v) @ right.T for u, s, v in parts])
        kept = left.shape[1] if density is None else max(1, int(density * common[0].numel()))
        merged = agreeing(_largest(common, kept), [1.0] * len(parts), [1.0] * len(parts), [1.0] * len(parts))
        own = [torch.ones(len(s), len(s), dtype=merged.dtype, device=merged.device) for _, s, _ in parts]
        result: Tensor = left @ (merged * torch.block_diag(*own)) @ right
        return result

    return merge_matrices(group, merge, lambda_)


def _even(values: Tensor) -> Tensor:
    return values.mean().expand_as(values) if len(values) else values


def _largest(matrices: Tensor, count: int) -> Tensor:
    """Of each matrix the entries of largest magnitude, those as large as the last of them included."""
    sizes = matrices.abs().flatten(1)
    least = sizes.topk(min(count, sizes.shape[1]), dim=1).values[:, -1:] if sizes.shape[1] else sizes[:, :1]
    return torch.where(sizes >= least, matrices.flatten(1), 0.0).reshape(matrices.shape)
