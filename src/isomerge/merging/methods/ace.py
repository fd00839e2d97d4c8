"""Regression mean without data: what each model reads is estimated from what it has changed."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import OptionError, Share, method
from isomerge.merging.methods.singular_vectors import is_linear_map
from isomerge.merging.methods.task_vectors import add_all, task_vectors, unpruned
from isomerge.merging.run.rows import Combine, TensorGroup

NOTHING = 1e-12  # keeps logarithms and divisions by the size of an unchanged model finite


@method(base="required", whole=True, reference="https://arxiv.org/abs/2603.02945")
def ace(
    group: TensorGroup,
    *,
    epsilon: float = 0.01,
    threshold: float = 0.3,
    share: Share = 0.3,
    lambda_: float = 1.0,
) -> Combine:
    """The regression mean of the changes, with covariances of inputs that are read off the changes (ACE-Merging).

    T_k is τ_k without the mean of its rows, S_k = T_kᵀT_k, c the mean row of Σ S_k;
    τ = (Σ T_k (S_k + ε)) (Σ (S_k + ε) + 1 cᵀ)⁻¹. Where the sizes differ much, with a variance of log ‖τ_k‖² above the
    threshold times its squared mean, each S_k and ε is divided by tr S_k, c by mean ‖τ_k‖², and the first singular
    directions of τ + Σ τ_k (S_k − mean (S_k + ε)) are added with their mean strength. What is not one linear map
    (vectors, vocabularies) gets the mean change.

    Options:
        epsilon: what is added to the diagonal of each covariance
        threshold: how different the models' sizes must be for their covariances to be normalized
        share: which share of the singular directions is then added again
        lambda: how much of the merged task vector is added to the base
    """
    if not epsilon > 0:
        raise OptionError(f"an epsilon of {epsilon} leaves nothing to invert; it is above 0.", "epsilon")
    if not is_linear_map(group):
        return add_all(unpruned(group.models), [1.0] * group.models, True, lambda_)
    block = group.whole()
    vectors = task_vectors(block).reshape(group.models, group.shape[0], -1).double()
    merged = _merged(vectors, epsilon, threshold, share) * lambda_
    return group.rows_of(block.onto_base(merged.reshape(group.shape).to(block.tensors.dtype)))


def _merged(vectors: Tensor, epsilon: float, threshold: float, share: float) -> Tensor:
    sizes = vectors.square().sum((1, 2))
    logarithms = (sizes + NOTHING).log()
    spread = logarithms.var() if len(vectors) > 1 else logarithms.new_zeros(())
    uneven = bool(spread > threshold * (logarithms.mean().square() + NOTHING))
    centred = vectors - vectors.mean(1, keepdim=True)
    covariances = centred.mT @ centred
    floor = torch.full_like(sizes, epsilon)
    if uneven:
        traces = covariances.diagonal(dim1=1, dim2=2).sum(1) + NOTHING
        covariances, floor = covariances / traces[:, None, None], floor / traces
    regular = covariances + floor[:, None, None] * torch.eye(
        vectors.shape[2], dtype=vectors.dtype, device=vectors.device
    )
    prior = covariances.sum(0).mean(0, keepdim=True) / (sizes.mean() + NOTHING if uneven else 1.0)
    merged: Tensor = torch.linalg.solve(regular.sum(0) + prior, (centred @ regular).sum(0), left=False)
    if uneven:
        merged = merged + _refinement(merged + (vectors @ (covariances - regular.mean(0))).sum(0), share)
    return merged


def _refinement(fused: Tensor, share: float) -> Tensor:
    """The first singular directions, all with their mean strength."""
    left, values, right = torch.linalg.svd(fused, full_matrices=False)
    count = int(len(values) * share)
    if not count:
        return torch.zeros_like(fused)
    refined: Tensor = values[:count].mean() * left[:, :count] @ right[:count]
    return refined
