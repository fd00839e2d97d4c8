"""What `isomerge.curve` hands back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.writer import Written
from isomerge.connectivity.curves.written import CurvePoints
from isomerge.errors import RequestError
from isomerge.evaluation.measure import MEASURE_FACTS, Numbers
from isomerge.results import Result


@dataclass
class MeasuredPath(Result):
    """Points along one path between the two models."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ("perturbed",)

    points: list[dict[str, Any]]
    """Each with `t`, `loss` and `metric`."""
    highest: float | None
    """The highest loss."""
    barrier: float | None
    """max over t of L(t) − [(1−t) L(A) + t L(B)]"""
    metric_barrier: float | None
    """The same for the metric, counted as a loss of quality."""
    perturbed: list[dict[str, Any]] | None = None
    """The same points with perturbed inputs, where `noise` or `attack` is set."""


@dataclass
class SampledPoints(Result):
    """Points drawn from a simplex."""

    points: list[dict[str, Any]]
    """Each with `weights`, one for each vertex, `loss` and `metric`."""
    ensemble: Numbers | None
    """Loss and metric of the mean of their probabilities."""


@dataclass
class TrainedCurve(MeasuredPath):
    """A path of low loss between two models, or a simplex with a path through it; any point of it is a model."""

    OPTIONAL = (*MEASURE_FACTS, "perturbed", "samples", "level")

    method: str = ""
    models: list[str] = field(default_factory=list)
    task: str = ""
    towards: str | None = None
    """What it was trained on: labels, predictions or a function; None for a geodesic."""
    level: str | None = None
    """Of the alignment of B to A before all else, where that was asked for."""
    straight: MeasuredPath | None = None
    """The straight line between the same two models."""
    parents: list[dict[str, Any]] = field(default_factory=list)
    """Each with `model`, `loss` and `metric`."""
    ensemble: Numbers | None = None
    """Loss and metric of the mean of the parents' probabilities."""
    samples: SampledPoints | None = None
    training: dict[str, Any] = field(default_factory=dict)
    """`steps`, `rate`, `pivots`, `seed`, `first_loss` and `last_loss` (means of a tenth of the steps), and what else
    the method has to say."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    metric_name: str | None = None
    higher_is_better: bool | None = None
    examples: int | None = None
    data: dict[str, Any] | None = None
    """Name, sha256, size and kind of what it was measured on."""
    _points: CurvePoints | None = field(default=None, repr=False, compare=False)

    def module(self, point: float | Sequence[float]) -> Any:
        """The module with the weights of a point; the next point takes their place."""
        return self._known().module(coordinates(point))

    def checkpoint(self, point: float | Sequence[float]) -> Checkpoint:
        """A point in memory, to be merged, aligned or evaluated like any model."""
        return self._known().checkpoint(coordinates(point))

    def save(self, point: float | Sequence[float], out: str | os.PathLike[str], *, force: bool = False) -> Written:
        """Write a point as a model that loads in the stock class: by t from 0 (A) to 1 (B), or in a simplex by a weight
        for each vertex. It has the config and side files of A."""
        return self._known().save(coordinates(point), out, force=force)

    def _known(self) -> CurvePoints:
        assert self._points is not None
        return self._points


def coordinates(point: float | Sequence[float]) -> list[float]:
    """One number, or one for each vertex."""
    try:
        return [float(x) for x in point] if isinstance(point, Sequence) else [float(point)]
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"Taking a point of a curve: it cannot be {point!r}. Name t from 0 to 1, or one number for each vertex."
        ) from error
