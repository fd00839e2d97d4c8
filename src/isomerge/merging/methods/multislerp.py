"""Barycentric interpolation on a sphere."""

from __future__ import annotations

import math

import numpy as np

from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.methods.reduce import gram, mixture
from isomerge.merging.methods.sphere import Span
from isomerge.merging.run.rows import Combine, TensorGroup


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
    found = _mean(Span(gram(group, deltas=True)), shares, eps)
    return mixture(found.tolist(), base=1 - float(found.sum()) if group.has_base else None)


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
