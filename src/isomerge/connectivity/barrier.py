"""`isomerge.barrier`: loss and metric on the straight line between two models, as they are and aligned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint, require_floating
from isomerge.connectivity.ends import Ends, aligned_ends, plain_ends, shared_positions
from isomerge.connectivity.measures import Measure, Numbers, by_data, by_loss
from isomerge.data.heads import label_names
from isomerge.data.open import open_data
from isomerge.errors import RequestError
from isomerge.evaluation.device import require_device
from isomerge.reporting.plots import require_drawable

MOST_POINTS = 10_000
Progress = Callable[[int, int, str], None]


def barrier(
    model_a: Any,
    model_b: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    data: Any = None,
    task: str | None = None,
    align: bool = False,
    level: str = "full",
    points: int = 11,
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
    """Measure (1 − t) A + t B at evenly spaced t.

    By `loss`, a function of the module, or by a task over `data` as in `isomerge.evaluate`. The record has `points[]`
    (t, loss, metric), `barrier` = max over t of L(t) − [(1−t) L(A) + t L(B)], `metric_barrier` (the same for the
    metric, counted as a loss of quality), `parents`, `ensemble` (the mean of the parents' probabilities), and with
    `align` the same under `aligned`, for B moved next to A without a change of its function.

    >>> isomerge.barrier(model_a, model_b, loss=my_loss, align=True)["aligned"]["barrier"]      # doctest: +SKIP
    0.02
    """
    start = time.perf_counter()
    if points < 3:
        raise RequestError(f"Measuring {points} points between two models: at least 3 are needed. Try --points 11.")
    require_few(points, points)
    if plot is not None:
        require_drawable(plot)
    if (loss is None) == (data is None):
        raise RequestError("Measuring between models: pass either loss=function or data=…, not both and not neither.")
    given = [model_a, model_b]
    checkpoints = open_models(given, device)
    measure, notes = choose_measure(
        checkpoints, loss, data, task, split=split, text=text, label=label, kind=kind, length=length,
        tokenizer=tokenizer, batch_size=batch_size, limit=limit, seed=seed, device=device,
    )  # fmt: skip
    total = (points + 1) * (2 if align else 1)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, "measuring")

    names = [checkpoint.name for checkpoint in checkpoints]
    record = _line(plain_ends(checkpoints, given, device), measure, names, points, tick)
    if align:
        ends, verdicts, more = aligned_ends(checkpoints, given, level, device)
        record["aligned"] = {
            "level": level,
            "verdict": verdicts[0],
            **_line(ends, measure, names, points, tick),
            "notes": more,
        }
    result = {"models": names, "task": measure.task, **measure.facts, **record, "notes": notes()}
    result["notes"] += broken_points(record["points"])
    result["seconds"] = time.perf_counter() - start
    if plot is not None:
        from isomerge.reporting.plots import plot_barrier

        plot_barrier(result, plot)
    return result


def require_few(count: int, points: int) -> None:
    """Every point runs a model over the data, so a number with a digit too many would take days."""
    if count > MOST_POINTS:
        raise RequestError(
            f"Measuring {count:,} points, each a run over the data: at most {MOST_POINTS:,} are measured. Ask for "
            f"fewer than --points {points}."
        )


def open_models(given: Sequence[Any], device: str) -> list[Checkpoint]:
    require_device(device)
    checkpoints = [open_checkpoint(model) for model in given]
    for checkpoint in checkpoints:
        require_floating(checkpoint)
    for other in checkpoints[1:]:
        kinds = [c.config.get("model_type") for c in (checkpoints[0], other)]
        if all(kinds) and kinds[0] != kinds[1]:
            raise RequestError(
                f"Going from {checkpoints[0].name} to {other.name}: one is a '{kinds[0]}' model and the other a "
                f"'{kinds[1]}' model, so nothing lies between them. Name models of one architecture and size."
            )
        own, theirs = (label_names(c.config) for c in (checkpoints[0], other))
        if own != theirs and sorted(own) == sorted(theirs):
            raise RequestError(
                f"Going from {checkpoints[0].name} to {other.name}: they have the same labels in another order "
                f"({', '.join(own[:5])} … and {', '.join(theirs[:5])} …), so their outputs do not correspond. Name "
                "models that were trained with one list of labels."
            )
    return checkpoints


def choose_measure(
    checkpoints: Sequence[Checkpoint],
    loss: Callable[[Any], Any] | None,
    data: Any,
    task: str | None,
    *,
    split: str | None,
    text: str | None,
    label: str | None,
    kind: str | None,
    length: int | None,
    tokenizer: Any,
    batch_size: int | None,
    limit: int | None,
    seed: int,
    device: str,
) -> tuple[Measure, Callable[[], list[str]]]:
    """The measure, and how to have the notes on the data once it has been read."""
    if loss is not None:
        return by_loss(loss), list
    opened = open_data(
        data, kind=kind, split=split, text=text, label=label, length=length, tokenizer=tokenizer, prefer="test"
    )
    shorter = shared_positions(checkpoints)
    for key, shortest in shorter.items():
        opened.note(f"the models take inputs of different length; the shortest counts ({key} {shortest})")
    reader = open_checkpoint(checkpoints[0], config={**checkpoints[0].config, **shorter})
    measure = by_data(opened, task, reader, batch_size=batch_size, limit=limit, seed=seed, device=device)
    return measure, lambda: list(opened.notes)


def _line(ends: Ends, measure: Measure, names: Sequence[str], points: int, tick: Callable[[], None]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for n in range(points):
        t = n / (points - 1)
        found.append({"t": t, **measure.at(ends, [1 - t, t])})
        tick()
    parents = [
        {"model": name, "loss": end["loss"], "metric": end["metric"]}
        for name, end in zip(names, (found[0], found[-1]), strict=True)
    ]
    together: Numbers | None = measure.ensemble(ends)
    tick()
    sign = 1.0 if measure.facts.get("higher_is_better") is False else -1.0
    return {
        "points": found,
        "barrier": height([point["loss"] for point in found]),
        "metric_barrier": height([None if p["metric"] is None else sign * p["metric"] for p in found]),
        "parents": parents,
        "ensemble": together,
    }


def height(values: Sequence[float | None]) -> float | None:
    """max over t of v(t) − [(1−t) v(0) + t v(1)], at evenly spaced t; NaN if one is, None if they are unknown.

    >>> height([1.0, 3.0, 2.0])
    1.5
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    last = len(known) - 1
    rises = [v - (known[0] * (last - n) + known[-1] * n) / last for n, v in enumerate(known)]
    return math.nan if any(math.isnan(rise) for rise in rises) else max(rises)


def broken_points(points: Sequence[dict[str, Any]]) -> list[str]:
    broken = [f"{p['t']:g}" for p in points if p["loss"] is not None and math.isnan(p["loss"])]
    return [f"the model computes NaN at t = {', '.join(broken)}"] if broken else []
