"""`isomerge.demo`: train pairs of models from different seeds, align, average, measure, write."""

from __future__ import annotations

import copy
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError

LEVELS = ("permutation", "rotation", "full")
POINTS = 21  # on the line between two models, both ends included
Progress = Callable[[int, int, str], None]


def demo(out: str | Path, *, seeds: int = 1, progress: Progress | None = None) -> dict[str, Any]:
    """Train `seeds` pairs of small image classifiers and average each pair without and with alignment.

    Pair k comes from the seeds 2k and 2k + 1. Each `out/pair-k` holds four models that load in their stock class:
    `model-a`, `model-b`, `model-b-aligned` (the function of b, next to a) and `merged`. `out/demo.json` holds every
    number, `out/curve.svg` the loss and accuracy on the line between the two models. The record is returned.
    """
    if seeds < 1:
        raise RequestError(f"Running the demo: {seeds} pairs cannot be trained. Ask for at least one.")
    from isomerge.align.parallel import parallel
    from isomerge.demo.digits import load_digits
    from isomerge.demo.picture import picture

    start = time.perf_counter()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    with parallel() as run:
        models = _train(2 * seeds, digits, run, progress)
        rows, curves = [], []
        for k in range(seeds):
            if progress:
                progress(k, seeds, "aligning and measuring")
            row, curve = _pair(k, models[2 * k], models[2 * k + 1], out / f"pair-{k}", digits)
            rows.append(row)
            curves.append(curve)
    record = {
        "title": "accuracy on 500 test digits; from 'none' on: the average of the two models",
        "pairs": rows,
        "curves": curves,
        "notes": _notes(curves),
        "out": str(out),
        "seconds": time.perf_counter() - start,
    }
    (out / "curve.svg").write_text(picture(curves), encoding="utf-8")
    (out / "demo.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _train(count: int, digits: Any, run: Any, progress: Progress | None) -> list[Any]:
    """Models of the seeds 0 … count − 1, side by side, one thread inside each: the number of cores changes no byte."""
    from isomerge.demo import digits as task

    lock, stop, done = threading.Lock(), threading.Event(), 0

    def tick() -> None:
        nonlocal done
        with lock:
            done += 1
            if stop.is_set():
                raise InterruptedError("training was stopped")
            if progress:
                progress(done, count * task.EPOCHS, f"training {count} models")

    models = [task.new_model(seed) for seed in range(count)]
    try:
        trained: list[Any] = run(
            lambda seed: task.train(models[seed], seed, digits, epochs=task.EPOCHS, tick=tick), range(count)
        )
    except BaseException:
        stop.set()  # an interrupt waits for an epoch, not for whole models
        raise
    return trained


def _pair(k: int, a: Any, b: Any, folder: Path, digits: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write and measure one pair: the accuracies at the middle, and the curves between the models."""
    from isomerge.demo.digits import accuracy, predict

    name = f"{2 * k}, {2 * k + 1}"
    moved, merged = _align(a, b, folder)
    ends = [predict(model, digits) for model in (a, b)]
    lines = {level: _line(a, model, digits) for level, model in moved.items()}
    row = {
        "seed": name,
        "parents": [accuracy(p, digits) for p in ends],
        "ensemble": accuracy((ends[0] + ends[1]) / 2, digits),
        **{level: line["accuracy"][POINTS // 2] for level, line in lines.items()},
        "full": accuracy(predict(merged, digits), digits),  # of the model as it was written
    }
    curve = {
        "seed": name,
        "t": [n / (POINTS - 1) for n in range(POINTS)],
        **{key: {level: line[key] for level, line in lines.items()} for key in ("loss", "accuracy")},
        "barrier": {level: _barrier(line["loss"]) for level, line in lines.items()},
        "max_probability_difference": float((predict(moved["full"], digits) - ends[1]).abs().max()),
    }
    return row, curve


def _align(a: Any, b: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    """Write the four models of a pair. Returns b as it is and moved at every level, and the merged model as written."""
    from isomerge.align.api import align
    from isomerge.checkpoint import open_checkpoint
    from isomerge.checkpoint.module import quiet_transformers
    from isomerge.evaluate.probe import load_stock
    from isomerge.merge.api import merge

    first, second, aligned, merged = (folder / name for name in ("model-a", "model-b", "model-b-aligned", "merged"))
    with quiet_transformers():
        a.save_pretrained(first)
        b.save_pretrained(second)
    alignments: dict[str, Any] = {level: align(second, anchor=first, level=level) for level in LEVELS}
    alignments["full"].save(aligned, force=True)
    merge([first, aligned]).save(merged, force=True)
    moved = {"none": b, **{level: alignment.apply(b) for level, alignment in alignments.items()}}
    stored = open_checkpoint(merged)
    return moved, load_stock(stored.config, {name: stored.read(name) for name in stored.tensors})


def _line(a: Any, b: Any, digits: Any) -> dict[str, list[float]]:
    """Loss and accuracy of (1 − t) a + t b at evenly spaced t from 0 to 1."""
    from isomerge.demo.digits import accuracy, loss, predict

    probe = copy.deepcopy(a)
    first, last = a.state_dict(), b.state_dict()
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for n in range(POINTS):
        probe.load_state_dict(_between(first, last, n / (POINTS - 1)))
        probabilities = predict(probe, digits)
        found["loss"].append(loss(probabilities, digits))
        found["accuracy"].append(accuracy(probabilities, digits))
    return found


def _between(first: Mapping[str, Any], last: Mapping[str, Any], t: float) -> dict[str, Any]:
    return {name: ((1 - t) * first[name].double() + t * last[name].double()).float() for name in first}


def _barrier(losses: list[float]) -> float:
    """`max_t L(t) − [(1−t) L(0) + t L(1)]` over evenly spaced t.

    >>> _barrier([1.0, 3.0, 2.0])
    1.5
    """
    last = len(losses) - 1
    return max(value - (losses[0] * (last - n) + losses[-1] * n) / last for n, value in enumerate(losses))


def _notes(curves: list[dict[str, Any]]) -> list[str]:
    def mean(level: str) -> float:
        return statistics.fmean(curve["barrier"][level] for curve in curves)

    exact = max(curve["max_probability_difference"] for curve in curves)
    return [
        f"loss barrier between the models: {mean('none'):.2f} as they are, {mean('rotation'):.2f} at level rotation, "
        f"{mean('full'):.2f} at level full",
        f"the aligned model predicts what it predicted before (largest difference of a probability: {exact:.0e})",
        "no data was used to align; every folder loads in the stock class",
    ]
