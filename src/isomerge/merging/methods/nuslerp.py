"""Spherical interpolation between two models, with weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.reduce import gram, total
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

STRAIGHT = 1e-7  # sin² of an angle that float32 does not know from 0 or π


@method(base="optional", least=2, most=2, reference="https://en.wikipedia.org/wiki/Slerp")
def nuslerp(
    group: TensorGroup,
    *,
    weight: PerModel[float] = each(1.0),
    nuslerp_row_wise: bool = False,
    nuslerp_flatten: bool = True,
) -> Combine:
    """Spherical interpolation from the first model to the second, by their weights; of the changes with a base.

    Options:
        weight: t is the second weight divided by the sum of both
        nuslerp_row_wise: without flatten, an angle for each vector along the first axis instead of along the last
        nuslerp_flatten: one angle for the whole tensor
    """
    t = 0.5 if abs(sum(weight)) < 1e-6 else weight[1] / sum(weight)
    if nuslerp_flatten or len(group.shape) < 2:
        whole = torch.tensor(gram(group, deltas=True), dtype=torch.float64)
        shares = _shares(t, whole[0, 0], whole[1, 1], whole[0, 1])
        return lambda block: _mixed(block, shares)
    if nuslerp_row_wise:
        sums = total(group, lambda block: _sums(block, dim=0)).expand(3, 1, *group.shape[1:])
        shares = _shares(t, *sums)
        return lambda block: _mixed(block, shares)
    return lambda block: _mixed(block, _shares(t, *_sums(block, dim=-1)))


def _sums(block: RowBlock, dim: int) -> Tensor:
    """Both squared norms and the product along an axis, which stays with length 1."""
    first, second = block.deltas.double()
    return torch.stack([(a * b).sum(dim, keepdim=True) for a, b in ((first, first), (second, second), (first, second))])


def _shares(t: float, first: Tensor, second: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """How much of each end: sin((1 − t) θ) / sin θ and sin(t θ) / sin θ, or on a line 1 − t and t."""
    lengths = first.sqrt().clamp_min(1e-7) * second.sqrt().clamp_min(1e-7)
    cosine = (product / lengths).clamp(-1, 1)
    line = 1 - cosine.square() <= STRAIGHT
    angle = torch.where(line, math.pi / 2, cosine.acos())
    one, other = ((part * angle).sin() / angle.sin() for part in (1 - t, t))
    return torch.where(line, 1 - t, one), torch.where(line, t, other)


def _mixed(block: RowBlock, shares: tuple[Tensor, Tensor]) -> Tensor:
    first, second = task_vectors(block)
    one, other = (share.to(dtype=first.dtype, device=first.device) for share in shares)
    return onto_base(block, first.mul_(one).add_(second.mul_(other)))
