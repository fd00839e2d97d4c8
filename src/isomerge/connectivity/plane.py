"""`plane`: the loss on a grid in the plane through three models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.arguments import require_shared_types, require_types
from isomerge.connectivity.barrier import choose_measure, require_few, require_one_measure
from isomerge.connectivity.endpoints import mixture_of, open_models
from isomerge.data.base import DataSource
from isomerge.errors import RequestError
from isomerge.evaluation.measure import MEASURE_FACTS
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.reporting.plots import plot_plane, require_drawable
from isomerge.results import Result
from isomerge.running.weight_replacement import Mixture

MARGIN = 0.25  # of the triangle's extent, on every side
FLAT = 1e-9  # sine² of the angle at A below which three models lie on a line


@dataclass
class Plane(Result):
    """Loss and metric on a grid in the plane through three models."""

    OPTIONAL = MEASURE_FACTS

    models: list[dict[str, Any]]
    """Each with `model`, `x`, `y`, `loss` and `metric`."""
    task: str
    aligned: bool
    x: list[float]
    y: list[float]
    loss: list[list[float | None]]
    """By y, then by x."""
    metric: list[list[float | None]]
    notes: list[str]
    seconds: float
    metric_name: str | None = None
    higher_is_better: bool | None = None
    examples: int | None = None
    data: dict[str, Any] | None = None
    """Name, sha256, size and kind."""


@shows_progress
def plane(
    model_a: Any,
    model_b: Any,
    model_c: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    data: DataSource = None,
    task: str | None = None,
    align: bool = False,
    level: str = "full",
    points: int = 13,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    plot: str | Path | None = None,
    progress: Shown = None,
) -> Plane:
    """Measure the plane through three models at `points` × `points` places; with `align`, B and C move next to A first.

    By `loss`, a function of the module, or by a task over `data` as in `isomerge.evaluate`. The axes are orthonormal in
    the space of weights: x goes from A towards B, y is at right angles to it towards C.
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(points=(points, int), align=(align, bool), level=(level, str))
    require_shared_types(
        task=task, batch_size=batch_size, limit=limit, seed=seed, device=device, plot=plot, progress=progress
    )
    if points < 2:
        raise RequestError(f"Measuring a plane of {points} × {points} points: at least 2 are needed each way.")
    require_few(points * points, points)
    if plot is not None:
        require_drawable(plot)
    require_one_measure(loss, data)
    given = [model_a, model_b, model_c]
    checkpoints = open_models(given, device)
    measure = choose_measure(
        checkpoints, loss, data, task, tokenizer=tokenizer, batch_size=batch_size, limit=limit, seed=seed, device=device
    )
    mixture, notes = mixture_of(checkpoints, given, level if align else None, device)
    corners = _corners(mixture)
    (_, (length_b, _), (along, across)) = corners
    xs, ys = _axis([0.0, length_b, along], points), _axis([0.0, across], points)
    losses: list[list[float | None]] = []
    metrics: list[list[float | None]] = []
    for row, y in enumerate(ys):
        measured = []
        for column, x in enumerate(xs):
            c = y / across
            b = (x - c * along) / length_b
            measured.append(measure.at(mixture.put([1 - b - c, b, c])))
            if progress:
                progress(row * points + column + 1, points * points, "measuring")
        losses.append([each["loss"] for each in measured])
        metrics.append([each["metric"] for each in measured])
    models = [
        {"model": checkpoint.name, "x": x, "y": y, **measure.at(mixture.corner(n))}
        for n, (checkpoint, (x, y)) in enumerate(zip(checkpoints, corners, strict=True))
    ]
    result = Plane(
        models, measure.task, align, xs, ys, losses, metrics, [*measure.notes, *notes],
        time.perf_counter() - start, **measure.facts,
    )  # fmt: skip
    if plot is not None:
        plot_plane(result.to_dict(), plot)
    return result


def _corners(mixture: Mixture) -> list[tuple[float, float]]:
    """Where the three models lie: A at the origin, B on the x axis."""
    bb, bc, cc = mixture.inner(1, 1), mixture.inner(1, 2), mixture.inner(2, 2)
    if bb <= 0 or cc <= 0 or bb * cc - bc * bc <= FLAT * bb * cc:
        raise RequestError("Measuring a plane: the three models lie on one line, or two are the same. Use barrier.")
    along = bc / math.sqrt(bb)
    return [(0.0, 0.0), (math.sqrt(bb), 0.0), (along, math.sqrt(cc - along * along))]


def _axis(places: list[float], points: int) -> list[float]:
    low, high = min(places), max(places)
    margin = MARGIN * (high - low)
    step = (high - low + 2 * margin) / (points - 1)
    return [low - margin + step * n for n in range(points)]
