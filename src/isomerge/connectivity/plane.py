"""`plane`: the loss on a grid in the plane through three models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isomerge.connectivity.barrier import Progress, choose_measure, open_models, require_few
from isomerge.connectivity.ends import Ends, aligned_ends, plain_ends
from isomerge.errors import RequestError
from isomerge.reporting.plots import require_drawable

MARGIN = 0.25  # of the triangle's extent, on every side
FLAT = 1e-9  # sine² of the angle at A below which three models lie on a line


def plane(
    model_a: Any,
    model_b: Any,
    model_c: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    data: Any = None,
    task: str | None = None,
    align: bool = False,
    level: str = "full",
    points: int = 13,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    kind: str | None = None,
    length: int | None = None,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    plot: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the plane through three models at `points` × `points` places; with `align`, B and C move next to A first.

    The axes are orthonormal in the space of weights: x goes from A towards B, y is at right angles to it towards C.
    The record has `x[]`, `y[]`, `loss[y][x]`, `metric[y][x]`, and `models[]` (model, x, y, loss, metric).
    """
    start = time.perf_counter()
    if points < 2:
        raise RequestError(f"Measuring a plane of {points} × {points} points: at least 2 are needed each way.")
    require_few(points * points, points)
    if plot is not None:
        require_drawable(plot)
    if (loss is None) == (data is None):
        raise RequestError("Measuring a plane: pass either loss=function or data=…, not both and not neither.")
    given = [model_a, model_b, model_c]
    checkpoints = open_models(given, device)
    measure, notes = choose_measure(
        checkpoints, loss, data, task, split=split, text=text, label=label, kind=kind, length=length,
        tokenizer=tokenizer, batch_size=batch_size, limit=limit, seed=seed, device=device,
    )  # fmt: skip
    more: list[str] = []
    if align:
        ends, _, more = aligned_ends(checkpoints, given, level, device)
    else:
        ends = plain_ends(checkpoints, given, device)
    corners = _corners(ends)
    (_, (length_b, _), (along, across)) = corners
    xs, ys = _axis([0.0, length_b, along], points), _axis([0.0, across], points)
    losses: list[list[float | None]] = []
    metrics: list[list[float | None]] = []
    for row, y in enumerate(ys):
        found = []
        for column, x in enumerate(xs):
            c = y / across
            b = (x - c * along) / length_b
            found.append(measure.at(ends, [1 - b - c, b, c]))
            if progress:
                progress(row * points + column + 1, points * points, "measuring")
        losses.append([each["loss"] for each in found])
        metrics.append([each["metric"] for each in found])
    models = [
        {"model": checkpoint.name, "x": x, "y": y, **measure.at(ends, [float(k == n) for k in range(3)])}
        for n, (checkpoint, (x, y)) in enumerate(zip(checkpoints, corners, strict=True))
    ]
    result = {
        "models": models, "task": measure.task, **measure.facts, "aligned": align, "x": xs, "y": ys, "loss": losses,
        "metric": metrics, "notes": [*notes(), *more], "seconds": time.perf_counter() - start,
    }  # fmt: skip
    if plot is not None:
        from isomerge.reporting.plots import plot_plane

        plot_plane(result, plot)
    return result


def _corners(ends: Ends) -> list[tuple[float, float]]:
    """Where the three models lie: A at the origin, B on the x axis."""
    bb, bc, cc = ends.inner(1, 1), ends.inner(1, 2), ends.inner(2, 2)
    if bb <= 0 or cc <= 0 or bb * cc - bc * bc <= FLAT * bb * cc:
        raise RequestError("Measuring a plane: the three models lie on one line, or two are the same. Use barrier.")
    along = bc / math.sqrt(bb)
    return [(0.0, 0.0), (math.sqrt(bb), 0.0), (along, math.sqrt(cc - along * along))]


def _axis(places: list[float], points: int) -> list[float]:
    low, high = min(places), max(places)
    margin = MARGIN * (high - low)
    step = (high - low + 2 * margin) / (points - 1)
    return [low - margin + step * n for n in range(points)]
