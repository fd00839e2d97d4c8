"""Interpolation and means on a sphere.

Every point such a mean passes through is a combination of the inputs, so all norms and angles follow from the inputs'
Gram matrix: vectors of billions of elements become vectors of as many numbers as there are models.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import gram, mixture, total
from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

Coefficients = np.ndarray
"""(models,): the vector Σ c_k W_k."""


class Span:
    """The combinations of some vectors whose Gram matrix is known."""

    def __init__(self, gram: list[list[float]]) -> None:
        self.gram = np.array(gram, dtype=np.float64)
        self.norms = np.sqrt(np.maximum(np.diag(self.gram), 0))

    def product(self, one: Coefficients, other: Coefficients) -> float:
        return float(one @ self.gram @ other)

    def norm(self, vector: Coefficients) -> float:
        return float(np.sqrt(max(self.product(vector, vector), 0.0)))

    def units(self, epsilon: float = 0.0) -> np.ndarray:
        """(models, models): each row is one input divided by its norm (+ epsilon); zero where it is zero."""
        lengths = self.norms + epsilon
        return np.diag(np.where(self.norms > 0, 1 / np.where(lengths > 0, lengths, 1), 0.0))


NEARLY_PARALLEL = 0.9995  # beyond it the arc is a straight line to working precision, and sin θ a bad divisor


@method(base="required", least=1, most=1, reference="https://en.wikipedia.org/wiki/Slerp")
def slerp(group: TensorGroup, *, t: float = 0.5) -> Combine:
    """Spherical interpolation from the base (t = 0) to the other model (t = 1).

    Everything on the arc is a combination of its ends, so two norms and one product decide it.

    Options:
        t: where on the arc: 0 is the base, 1 the other model
    """
    products = gram(group, base=True)  # the base comes last
    other, start = (math.sqrt(products[i][i]) for i in range(2))
    other, start = (length if length > 1e-8 else 1.0 for length in (other, start))
    cosine = max(-1.0, min(1.0, products[0][1] / (other * start)))
    if abs(cosine) > NEARLY_PARALLEL:
        return mixture([t], base=1 - t)
    angle = math.acos(cosine)
    return mixture([math.sin(t * angle) / math.sin(angle)], base=math.sin((1 - t) * angle) / math.sin(angle))


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


@method(base="optional", least=1, reference="https://goddard.blog/posts/multislerp-wow-what-a-cool-idea")
def multislerp(
    group: TensorGroup, *, weight: PerModel[float] = each(1.0), normalize_weights: bool = True, eps: float = 1e-8
) -> Combine:
    """Spherical mean of any number of models, in the tangent space at their mean direction; of the changes with a base.

    Options:
        weight: how much of each model
        normalize_weights: divide the weights by their sum
        eps: keeps divisions by a norm of zero finite
    """
    if group.models == 1:
        return mixture([1.0])
    shares = np.array(weight, dtype=np.float64)
    if normalize_weights:
        if abs(shares.sum()) < 1e-12:
            raise OptionError(
                f"the weights {weight} add up to zero. Give others, or normalize_weights: false.",
                "weight",
                "normalize_weights",
            )
        shares = shares / shares.sum()
    coefficients = _mean(Span(gram(group, deltas=True)), shares, eps)
    return mixture(coefficients.tolist(), base=1 - float(coefficients.sum()) if group.has_base else None)


def _mean(span: Span, shares: np.ndarray, eps: float) -> np.ndarray:
    units = span.units(eps)
    centre = shares @ units
    length = span.norm(centre)
    if length < eps:  # opposed inputs that balance have no mean direction, nor have inputs that are all zero
        return shares
    centre = centre / length
    tangent = shares @ np.array([unit - span.product(unit, centre) * centre for unit in units])
    angle = span.norm(tangent) + eps
    mean: np.ndarray = (centre * math.cos(angle) + tangent * (math.sin(angle) / angle)) * float(span.norms @ shares)
    return mean


@method(reference="https://arxiv.org/abs/2603.04972")
def karcher(group: TensorGroup, *, max_iter: int = 10, tol: float = 1e-5) -> Combine:
    """The direction nearest to those of all models by squared angles, with the mean of their norms.

    Options:
        max_iter: how many steps at most
        tol: stop when a step is shorter than this angle
    """
    if group.models == 1:
        return mixture([1.0])
    span = Span(gram(group))
    direction = _direction(span, max_iter, tol)
    if direction is None:
        return mixture([1 / group.models] * group.models)
    return mixture((direction * span.norms.mean()).tolist())


def _direction(span: Span, max_iter: int, tol: float) -> np.ndarray | None:
    """Gradient descent on the sphere, on coefficients; none where the models balance each other or are all zero."""
    # A model of next to no norm has no direction to count.
    units = span.units()[span.norms > tol * span.norms.max()]
    mean = units.mean(axis=0) if len(units) else np.zeros_like(span.norms)
    length = span.norm(mean)
    if length < tol:
        return None
    mean = mean / length
    for _ in range(max_iter):
        tangent = np.zeros_like(mean)
        for unit in units:
            cosine = max(-1.0, min(1.0, span.product(mean, unit)))
            angle = math.acos(cosine)
            if tol <= angle < math.pi - 1e-12:  # towards an opposite point no way is the shortest
                tangent += angle / math.sin(angle) * (unit - cosine * mean) / len(units)
        step = span.norm(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        mean = mean / span.norm(mean)
    return mean
