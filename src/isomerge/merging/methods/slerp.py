"""Spherical interpolation between two models."""

from __future__ import annotations

import math

from isomerge.merging.methods.method import method
from isomerge.merging.methods.reduce import gram, mixture
from isomerge.merging.run.rows import Combine, TensorGroup

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
