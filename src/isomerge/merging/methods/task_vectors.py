"""Task vectors, and the two ways to add them up: all of them, or those that agree on a sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.merging.methods.method import OptionError
from isomerge.merging.run.rows import Combine, RowBlock


def task_vectors(block: RowBlock) -> Tensor:
    """(models, rows, …): what each model added to the base, in new memory that may be overwritten."""
    return block.tensors.clone() if block.base is None else block.tensors - block.base


def task_index(task: int, models: int, name: str) -> int:
    """Its place in the list of models."""
    if not 1 <= task <= models:
        raise OptionError(f"{name} has {models} models and no model {task}: 'task' counts them from 1.", "task")
    return task - 1


@dataclass(frozen=True)
class Pruned:
    """Task vectors of which something was dropped."""

    vectors: Callable[[RowBlock], Tensor]
    """What is left, in new memory."""
    scale: Sequence[float]
    """By how much what is left of each model is to be multiplied."""


def unpruned(models: int) -> Pruned:
    return Pruned(task_vectors, [1.0] * models)


def add_all(pruned: Pruned, weight: Sequence[float], normalize: bool, lambda_: float) -> Combine:
    """Base + λ Σ w_k τ_k, divided by Σ w_k if `normalize`."""
    total = sum(weight)
    factor = lambda_ / total if normalize and abs(total) >= 1e-8 else lambda_

    def combine(block: RowBlock) -> Tensor:
        vectors = pruned.vectors(block)
        merged = vectors[0].mul_(weight[0] * pruned.scale[0] * factor)
        for vector, w, s in zip(vectors[1:], weight[1:], pruned.scale[1:], strict=True):
            merged.add_(vector, alpha=w * s * factor)
        return onto_base(block, merged)

    return combine


def add_agreeing(pruned: Pruned, weight: Sequence[float], normalize: bool, lambda_: float) -> Combine:
    """Base + λ Σ w_k τ_k over the models whose sign is the majority's, divided by their Σ w_k if `normalize`."""
    votes = [w * s for w, s in zip(weight, pruned.scale, strict=True)]
    counts = weight if normalize else None

    def combine(block: RowBlock) -> Tensor:
        merged = agreeing(pruned.vectors(block), votes, [1.0] * len(votes), counts)
        return onto_base(block, merged if lambda_ == 1 else merged.mul_(lambda_))

    return combine


def onto_base(block: RowBlock, merged: Tensor) -> Tensor:
    """Base + merged, in the memory of `merged`."""
    return merged if block.base is None else merged.add_(block.base)


def agreeing(
    vectors: Tensor, votes: Sequence[float], share: Sequence[float], counts: Sequence[float] | None, floor: float = 0.0
) -> Tensor:
    """Elect a sign for each weight and add up what agrees with it.

    The sign of Σ v_k τ_k wins, v being the `votes`; a tie is positive. The result is Σ s_k v_k τ_k over the models
    whose v_k τ_k has that sign, s being the `share`, divided by their Σ c_k, c being the `counts`, of at least `floor`.
    `vectors` is overwritten. There is no boolean mask: numbers of one type are what processors are quick with.
    """
    for vector, vote in zip(vectors, votes, strict=True):
        if vote != 1:
            vector.mul_(vote)
    sign = _sum(vectors)
    torch.copysign(torch.ones((), dtype=sign.dtype, device=sign.device), sign, out=sign)
    merged, divisor = vectors[0], None
    for index, vector in enumerate(vectors):
        vector.mul_(sign).clamp_min_(0)  # zero now, unless it agrees
        if counts is not None:
            agrees = vector.sign()
            divisor = agrees.mul_(counts[0]) if divisor is None else divisor.add_(agrees, alpha=counts[index])
        if index == 0:
            merged.mul_(share[0])
        else:
            merged.add_(vector, alpha=share[index])
    if divisor is not None and counts is not None:
        merged.div_(_nonzero(divisor, counts, floor))
    return merged.mul_(sign)


def _nonzero(divisor: Tensor, counts: Sequence[float], floor: float) -> Tensor:
    """The divisor, with something harmless where nobody agrees and there is nothing to divide."""
    least = floor or min((count for count in counts if count != 0), default=1.0)
    if least > 0:
        return divisor.clamp_min_(least)
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)  # weights of both signs may cancel


def _sum(vectors: Tensor) -> Tensor:
    result = vectors[0] + 0.0  # a new tensor, and no negative zero
    for vector in vectors[1:]:
        result.add_(vector)
    return result
