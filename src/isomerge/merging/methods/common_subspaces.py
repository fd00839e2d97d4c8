"""Task vectors in the space that they share: there they are small, and another method merges them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from isomerge.merging.methods.method import METHODS, OptionError, PerModel, each, method
from isomerge.merging.methods.singular_vectors import merge_matrices, singular
from isomerge.merging.run.rows import Combine, InMemory, TensorGroup

Inner = Literal["task_arithmetic", "ties", "dare_linear", "dare_ties", "tsv", "iso_c"]


@method(base="required", whole=True, reference="https://arxiv.org/abs/2410.19735")
def knots(
    group: TensorGroup,
    *,
    inner: Inner = "ties",
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    lambda_: float = 1.0,
) -> Combine:
    """Merge the changes in the outputs that they share, by another method (KnOTS).

    [τ_1 … τ_K] = U S [V_1 … V_K]ᵀ; base + λ U · inner(S V_1ᵀ, …, S V_Kᵀ). What is not one linear map (vectors,
    vocabularies) gets the mean change.

    Options:
        inner: what merges in the shared space: task_arithmetic, ties, dare_linear, dare_ties, tsv or iso_c
        weight: how much of each task vector, if the inner method has weights
        density: which share of each is kept, if the inner method drops some
        lambda: how much of the merged task vector is added to the base
    """

    def merge(vectors: Tensor) -> Tensor:
        left, values, right = singular(torch.cat(list(vectors), dim=1))
        cores = (values[:, None] * right).reshape(len(values), len(vectors), -1).transpose(0, 1)
        return left @ _merged(group, cores, inner, weight, density)

    return merge_matrices(group, merge, lambda_)


@method(base="required", whole=True, reference="https://arxiv.org/abs/2509.17786")
def core_space(
    group: TensorGroup,
    *,
    inner: Inner = "ties",
    weight: PerModel[float] = each(1.0),
    density: PerModel[float] = each(1.0),
    lambda_: float = 1.0,
) -> Combine:
    """Merge low-rank changes in the outputs and inputs that they share, by another method (Core Space).

    τ_k = B_k A_k; U spans the columns of [B_1 … B_K], V those of [A_1; …; A_K]ᵀ; base + λ U · inner(Uᵀ τ_k V) · Vᵀ.
    B_k and A_k are an adapter's own, or τ_k's singular vectors times the roots of its singular values. What is not one
    linear map gets the mean change.

    Options:
        inner: what merges in the shared space: task_arithmetic, ties, dare_linear, dare_ties, tsv or iso_c
        weight: how much of each task vector, if the inner method has weights
        density: which share of each is kept, if the inner method drops some
        lambda: how much of the merged task vector is added to the base
    """

    def merge(vectors: Tensor) -> Tensor:
        factors = group.factors or [_balanced(vector) for vector in vectors]
        left = singular(torch.cat([b.to(vectors) for b, _ in factors], dim=1))[0]
        right = singular(torch.cat([a.to(vectors) for _, a in factors]))[2]
        merged: Tensor = left @ _merged(group, left.T @ vectors @ right.T, inner, weight, density) @ right
        return merged

    return merge_matrices(group, merge, lambda_)


def _balanced(vector: Tensor) -> tuple[Tensor, Tensor]:
    left, values, right = singular(vector)
    return left * values.sqrt(), values.sqrt()[:, None] * right


def _merged(group: TensorGroup, cores: Tensor, inner: str, weight: list[float], density: list[float]) -> Tensor:
    """The cores of all models, merged as if they were tensors of models whose base is 0."""
    known = {option.name for option in METHODS[inner].options}
    options: dict[str, list[float]] = {}
    for name, values in (("weight", weight), ("density", density)):
        if name in known:
            options[name] = values
        elif any(value != 1 for value in values):
            raise OptionError(f"the inner method {inner} has no {name}. Leave it out, or choose ties.", name)
    small = TensorGroup(
        group.name, [InMemory(core) for core in cores], InMemory(torch.zeros_like(cores[0])), seed=group.seed,
        device=group.device,
    )  # fmt: skip
    combine = METHODS[inner](small, **options)
    return torch.cat([combine(block).reshape(-1) for block in small.blocks()]).reshape(cores.shape[1:])
