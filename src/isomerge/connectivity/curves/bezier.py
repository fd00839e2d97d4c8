"""A Bézier curve of low loss (Garipov et al. 2018, arXiv 1802.10026).

    φ(t) = (1 − t)² A + 2 t (1 − t) θ + t² B        min over θ of E_{t ~ U(0, 1)} L(φ(t))

With more than one pivot it is the Bézier curve of that many control points. The expectation is over t and not over the
length of the curve, as in the paper's experiments.
"""

from __future__ import annotations

from isomerge.connectivity.curves.problem import CurveProblem, Trained, expected_loss
from isomerge.connectivity.curves.shapes import BezierCurve


def bezier(problem: CurveProblem) -> Trained:
    return expected_loss(problem, BezierCurve(problem.pivots + 2))
