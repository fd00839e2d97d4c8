"""The Karcher mean: the point of the sphere with the least sum of squared angles to all models."""

from __future__ import annotations

import math

import numpy as np

from isomerge.merging.methods.method import method
from isomerge.merging.methods.reduce import gram, mixture
from isomerge.merging.methods.sphere import Span
from isomerge.merging.run.rows import Combine, TensorGroup


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
