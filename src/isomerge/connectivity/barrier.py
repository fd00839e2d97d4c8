"""`isomerge.barrier`: loss and metric on the straight line between two models, as they are and aligned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import Checkpoint
from isomerge.connectivity.endpoints import aligned_mixture, open_models, plain_mixture, reader_for_all
from isomerge.data.base import DataSource
from isomerge.data.open import open_data
from isomerge.errors import RequestError
from isomerge.evaluation.measure import MEASURE_FACTS, DataMeasure, LossMeasure, Numbers
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.reporting.plots import plot_barrier, require_drawable
from isomerge.results import Result
from isomerge.running.weight_replacement import Mixture

MOST_POINTS = 10_000


@dataclass
class LineCurve(Result):
    """What was measured on one line."""

    points: list[dict[str, Any]]
    """Each with `t`, `loss` and `metric`."""
    barrier: float | None
    """max over t of L(t) − [(1−t) L(A) + t L(B)]"""
    metric_barrier: float | None
    """The same for the metric, counted as a loss of quality."""
    parents: list[dict[str, Any]]
    """Each with `model`, `loss` and `metric`."""
    ensemble: Numbers | None
    """Loss and metric of the mean of the parents' probabilities."""


@dataclass
class AlignedLineCurve(LineCurve):
    """The line after B was moved next to A without a change of its function."""

    level: str
    verdict: str
    notes: list[str]


@dataclass
class Barrier(LineCurve):
    """The line between two models, and with `align` the aligned one beside it."""

    OPTIONAL = (*MEASURE_FACTS, "aligned")

    models: list[str]
    task: str
    notes: list[str]
    seconds: float
    metric_name: str | None = None
    higher_is_better: bool | None = None
    examples: int | None = None
    data: dict[str, Any] | None = None
    """Name, sha256, size and kind."""
    aligned: AlignedLineCurve | None = None


@shows_progress
def barrier(
    model_a: Any,
    model_b: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    data: DataSource = None,
    task: str | None = None,
    align: bool = False,
    level: str = "full",
    points: int = 11,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    plot: str | Path | None = None,
    progress: Shown = None,
) -> Barrier:
    """Measure (1 − t) A + t B at evenly spaced t.

    By `loss`, a function of the module, or by a task over `data` as in `isomerge.evaluate`. With `align` the same is
    measured for B moved next to A, under `aligned`.

    >>> record = isomerge.barrier("model-a", "model-b", data="cifar10.tar.xz", align=True)
    >>> record.barrier >= 0 and record.aligned.barrier >= 0
    True
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(points=(points, int), align=(align, bool), level=(level, str))
    require_shared_types(
        task=task, batch_size=batch_size, limit=limit, seed=seed, device=device, plot=plot, progress=progress
    )
    if points < 3:
        raise RequestError(f"Measuring {points} points between two models: at least 3 are needed. Try 11.")
    require_few(points, points)
    if plot is not None:
        require_drawable(plot)
    given = [model_a, model_b]
    require_one_measure(loss, data)
    checkpoints = open_models(given, device)
    measure = choose_measure(
        checkpoints, loss, data, task, tokenizer=tokenizer, batch_size=batch_size, limit=limit, seed=seed, device=device
    )
    total = (points + 1) * (2 if align else 1)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, "measuring")

    names = [checkpoint.name for checkpoint in checkpoints]
    line = _line(plain_mixture(checkpoints, given, device), measure, names, points, tick)
    aligned = None
    if align:
        mixture, verdicts, notes = aligned_mixture(checkpoints, given, level, device)
        moved = _line(mixture, measure, names, points, tick)
        notes += broken_points(moved.points)
        aligned = AlignedLineCurve(**vars(moved), level=level, verdict=verdicts[0], notes=notes)
    result = Barrier(
        **vars(line), models=names, task=measure.task, notes=[*measure.notes, *broken_points(line.points)],
        seconds=time.perf_counter() - start, aligned=aligned, **measure.facts,
    )  # fmt: skip
    if plot is not None:
        plot_barrier(result.to_dict(), plot)
    return result


def require_one_measure(loss: Any, data: Any) -> None:
    if (loss is None) == (data is None):
        raise RequestError("Measuring between models: pass either loss=function or data=…, not both and not neither.")
    if loss is not None and not callable(loss):
        raise RequestError(f"Measuring between models: loss must be a function of the module, not {loss!r}.")


def require_few(count: int, points: int) -> None:
    """Every point runs a model over the data, so a number with a digit too many would take days."""
    if count > MOST_POINTS:
        raise RequestError(
            f"Measuring {count:,} points, each a run over the data: at most {MOST_POINTS:,} are measured. Ask for "
            f"fewer than points={points}.",
            keys=("points",),
        )


def choose_measure(
    checkpoints: Sequence[Checkpoint],
    loss: Callable[[Any], Any] | None,
    data: DataSource,
    task: str | None,
    *,
    tokenizer: Any,
    batch_size: int | None,
    limit: int | None,
    seed: int,
    device: str,
) -> DataMeasure | LossMeasure:
    if loss is not None:
        return LossMeasure(loss)
    opened = open_data(data, tokenizer=tokenizer, prefer="test")
    reader = reader_for_all(checkpoints, opened)
    return DataMeasure(opened, task, reader, batch_size=batch_size, limit=limit, seed=seed, device=device)


def _line(
    mixture: Mixture, measure: DataMeasure | LossMeasure, names: Sequence[str], points: int, tick: Callable[[], None]
) -> LineCurve:
    measured: list[dict[str, Any]] = []
    for n in range(points):
        t = n / (points - 1)
        measured.append({"t": t, **measure.at(mixture.put([1 - t, t]))})
        tick()
    parents = [
        {"model": name, "loss": end["loss"], "metric": end["metric"]}
        for name, end in zip(names, (measured[0], measured[-1]), strict=True)
    ]
    # The one module takes turns with the weights of each model, batch by batch: nothing grows with the data.
    ensemble = measure.combined([partial(mixture.corner, n) for n in range(len(names))])
    tick()
    sign = 1.0 if measure.facts.get("higher_is_better") is False else -1.0
    losses = [point["loss"] for point in measured]
    qualities = [None if point["metric"] is None else sign * point["metric"] for point in measured]
    return LineCurve(measured, height(losses), height(qualities), parents, ensemble)


def height(values: Sequence[float | None], ends: tuple[float | None, float | None] | None = None) -> float | None:
    """max over t of v(t) − [(1−t) v(0) + t v(1)], at evenly spaced t; NaN if one is, None if they are unknown. `ends`
    stand in the place of the first and the last value where a path does not end there.

    >>> height([1.0, 3.0, 2.0])
    1.5
    """
    first, last = ends or (values[0], values[-1])
    known = [value for value in values if value is not None]
    if len(known) < len(values) or first is None or last is None:
        return None
    parts = len(known) - 1
    rises = [v - (first * (parts - n) + last * n) / parts for n, v in enumerate(known)]
    return math.nan if any(math.isnan(rise) for rise in rises) else max(rises)


def broken_points(points: Sequence[dict[str, Any]]) -> list[str]:
    broken = [f"{p['t']:g}" for p in points if p["loss"] is not None and math.isnan(p["loss"])]
    return [f"the model computes NaN at t = {', '.join(broken)}"] if broken else []
