"""A polygonal chain of low loss (Garipov et al. 2018, arXiv 1802.10026).

    φ(t) = straight from A to θ_1, …, θ_n, B, each part over the same range of t        min over θ of E_t L(φ(t))

Every point of it is the mean of two neighbours, so any of its points is also a merge of two models.
"""

from __future__ import annotations

from isomerge.connectivity.curves.problem import CurveProblem, Trained, expected_loss
from isomerge.connectivity.curves.shapes import PolygonalChain


def chain(problem: CurveProblem) -> Trained:
    return expected_loss(problem, PolygonalChain.even(problem.pivots))
