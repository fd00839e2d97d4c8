"""Sparse soups (Zimmer et al. 2023, arXiv 2306.16788): averages of pruned models that are as sparse as each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import kth_smallest
from isomerge.merging.methods.method import OptionError, PerModel, Share, each, method
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="optional", reference="https://arxiv.org/abs/2306.16788")
def sparse_soup(group: TensorGroup, *, weight: PerModel[float] = each(1.0), density: Share = 1.0) -> Combine:
    """Average models that were pruned alike, and keep their mask: what is zero stays exactly zero.

    M ⊙ Σ_k w_k W_k / Σ_k w_k, M = (base ≠ 0); without a base, M is where no model is zero. Norms, biases and other
    tensors of one axis are averaged without a mask.

    Options:
        weight: how much of each model
        density: which share of each matrix is kept, its largest weights by size; for the next round of pruning
    """
    total = sum(weight)
    if abs(total) < 1e-12:
        raise OptionError(f"the weights {weight} add up to zero. Give others.", "weight")
    shares = [w / total for w in weight]
    counts = [number for number, share in enumerate(shares) if share]

    def masked(block: RowBlock) -> Tensor:
        mean = (block.tensors * block.like(shares)).sum(dim=0)
        if len(group.shape) < 2:
            return mean
        kept = block.tensors[counts].ne(0).all(dim=0) if block.base is None else block.base.ne(0)
        return mean * kept

    left_out = group.elements - max(1, round(density * group.elements)) if density > 0 else group.elements
    if len(group.shape) < 2 or left_out <= 0:
        return masked
    if left_out >= group.elements:
        return lambda block: torch.zeros_like(block.tensors[0])
    ((least,),) = kth_smallest(group, lambda block: masked(block).abs().unsqueeze(0), [[left_out]])
    return lambda block: (soup := masked(block)) * soup.abs().ge(least)
