"""The ways to find points of low loss around two models. A further one is a function and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isomerge.connectivity.curves.autoneb import autoneb
from isomerge.connectivity.curves.bezier import bezier
from isomerge.connectivity.curves.chain import chain
from isomerge.connectivity.curves.geodesic import geodesic
from isomerge.connectivity.curves.problem import CurveProblem, Trained
from isomerge.connectivity.curves.simplex import simplex
from isomerge.connectivity.curves.subspace import subspace


@dataclass(frozen=True)
class CurveMethod:
    train: Callable[[CurveProblem], Trained]
    pivots: int
    """How many vertices learn beside A and B, unless somebody asks for another number."""
    fewest: int = 1
    spread: float | None = None
    """The weight of what keeps vertices apart; None where nothing does."""
    has_goal: bool = True
    """Whether there is a loss to choose."""


METHODS: dict[str, CurveMethod] = {
    "bezier": CurveMethod(bezier, 1),
    "chain": CurveMethod(chain, 1),
    "autoneb": CurveMethod(autoneb, 3),
    "simplex": CurveMethod(simplex, 2, spread=0.01),
    "subspace": CurveMethod(subspace, 0, fewest=0, spread=1.0),
    "geodesic": CurveMethod(geodesic, 5, has_goal=False),
}
