"""`isomerge.demo`: train models from different seeds, merge them in every way, measure, write, show."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isomerge.choices import LEVELS
from isomerge.errors import RequestError

if TYPE_CHECKING:
    from isomerge.demonstration.merging import Group

MODELS = 3  # merged at once
Progress = Callable[[int, int, str], None]


def demo(out: str | Path, *, seeds: int = 1, force: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Train small image classifiers and merge two, then three, without and with alignment and by their features.

    `seeds` is the number of pairs; pair k comes from the seeds 2k and 2k + 1, the three from 0, 1 and 2. In `out`,
    `models/seed-n` are the trained models, `pair-k` and `three` hold one folder for each way to merge them, and
    `pair-k/aligned` the second model of the pair next to the first. All load in their stock class. `report.html`
    shows what was found, `isomerge.json` holds the numbers, `curve.svg` the line between two models. The record is
    returned. A folder with other things in it is refused unless `force`; an earlier demo's is replaced.

    `progress` is told how much of a stage is done, its total, and "stage: what is being done".
    """
    if seeds < 1:
        raise RequestError(f"Running the demo: {seeds} pairs cannot be trained. Ask for at least one.")
    from isomerge.demonstration.digits import load_digits
    from isomerge.demonstration.folder import claim, require_free
    from isomerge.demonstration.how import how
    from isomerge.demonstration.picture import picture
    from isomerge.merging.run.memory import peak_memory
    from isomerge.reporting.page import write_report
    from isomerge.reporting.record import PAGE, RECORD, write_text
    from isomerge.threads import parallel

    start = time.perf_counter()
    out = Path(out)
    require_free(out, force=force)
    digits = load_digits()
    with parallel() as run:
        models = _train(max(MODELS, 2 * seeds), digits, run, progress)
        folders = ["models", *(f"pair-{k}" for k in range(seeds)), "three"]
        claim(out, [*folders, RECORD, PAGE, "curve.svg"], force=force)
        found = _Demo(out, digits, models, seeds, progress)
        groups, curves = found.groups(), found.curves()
        record: dict[str, Any] = {
            "title": "accuracy on 500 test digits; from 'none' on: one model made from the two",
            "pairs": [_pair(group) for group in groups[:-1]],
            "curves": curves,
            "groups": [groups[0].record(), groups[-1].record()],
            "plane": found.plane(),
            **found.relations,
            "how": how([groups[0], groups[-1]], found.folders, seeds),
            "notes": _notes(curves),
            "out": str(out),
        }
        record["seconds"] = time.perf_counter() - start
        record["run"] = {
            "seconds": record["seconds"],
            "peak_memory_bytes": peak_memory(),
            "checks": found.checks(curves),
        }
    write_text(out / "curve.svg", picture(curves))
    page = write_report(out, {**record, "kind": "demo"})
    return {**record, "report": None if page is None else str(page)}


def _train(count: int, digits: Any, run: Any, progress: Progress | None) -> list[Any]:
    """Models of the seeds 0 … count − 1, side by side, one thread inside each: the number of cores changes no byte."""
    from isomerge.demonstration import digits as task

    lock, stop, done = threading.Lock(), threading.Event(), -1

    def tick() -> None:
        nonlocal done
        with lock:
            done += 1
            if stop.is_set():
                raise InterruptedError("training was stopped")
            if progress:
                progress(done, count * task.EPOCHS, f"training {count} models")

    tick()
    models = [task.new_model(seed) for seed in range(count)]
    try:
        trained: list[Any] = run(
            lambda seed: task.train(models[seed], seed, digits, epochs=task.EPOCHS, tick=tick), range(count)
        )
    except BaseException:
        stop.set()  # an interrupt waits for an epoch, not for whole models
        raise
    return trained


class _Demo:
    """The trained models on disk, and what is done with them."""

    def __init__(self, out: Path, digits: Any, models: list[Any], pairs: int, progress: Progress | None) -> None:
        from isomerge.checkpoint.memory import quiet_transformers

        self.out, self.digits, self.models, self.pairs = out, digits, models, pairs
        self.progress = progress or (lambda *_: None)
        self.folders = {seed: out / "models" / f"seed-{seed}" for seed in range(len(models))}
        self.relations: dict[str, Any] = {}
        with quiet_transformers():
            for seed, folder in self.folders.items():
                models[seed].save_pretrained(folder)

    def groups(self) -> list[Group]:
        """Every pair, then the first three models at once."""
        from isomerge.demonstration.merging import merge_group

        chosen = [([2 * k, 2 * k + 1], f"pair-{k}") for k in range(self.pairs)]
        return [
            merge_group(seeds, self.folders, self.out, name, self.digits, self.progress)
            for seeds, name in [*chosen, (list(range(MODELS)), "three")]
        ]

    def curves(self) -> list[dict[str, Any]]:
        return [self._curve(k) for k in range(self.pairs)]

    def _curve(self, k: int) -> dict[str, Any]:
        """Loss and accuracy between the models of a pair, as they are and aligned at every level; the aligned model
        is written."""
        from isomerge.alignment.api import align
        from isomerge.alignment.record import align_record
        from isomerge.demonstration.digits import predict
        from isomerge.demonstration.lines import POINTS, barrier, between

        first, second = 2 * k, 2 * k + 1
        self.progress(k, self.pairs + 1, f"measuring: the line between models {first} and {second}")
        a, b = self.models[first], self.models[second]
        alignments: dict[str, Any] = {
            level: align(self.folders[second], anchor=self.folders[first], level=level) for level in LEVELS
        }
        aligned = self.out / f"pair-{k}" / "aligned"
        alignments["full"].save(aligned, force=True, report=False)
        if k == 0:
            told = align_record(alignments["full"], aligned)
            names = {str(self.folders[seed]): f"model {seed}" for seed in (first, second)}
            self.relations = {key: _renamed(told[key], names) for key in ("alignment", "measured")}
        moved = {"none": b, **{level: alignment.apply(b) for level, alignment in alignments.items()}}
        lines = {level: between(a, model, self.digits) for level, model in moved.items()}
        change = predict(moved["full"], self.digits) - predict(b, self.digits)
        return {
            "seed": f"{first}, {second}",
            "t": [n / (POINTS - 1) for n in range(POINTS)],
            **{key: {level: line[key] for level, line in lines.items()} for key in ("loss", "accuracy")},
            "barrier": {level: barrier(line["loss"]) for level, line in lines.items()},
            "max_probability_difference": float(change.abs().max()),
        }

    def plane(self) -> dict[str, Any]:
        """Through the first pair and its second model where alignment puts it."""
        from isomerge.demonstration.lines import loss_plane

        what = "measuring: the plane through models 0 and 1 and the aligned one"
        self.progress(self.pairs, self.pairs + 1, what)
        moved = self.out / "pair-0" / "aligned"
        corners = {"model 0": self.folders[0], "model 1": self.folders[1], "model 1, aligned": moved}
        return loss_plane(corners, self.digits)

    def checks(self, curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Whatever was merged was measured as loaded from its folder; what is left is to load the aligned models."""
        from isomerge.demonstration.merging import WAYS, load

        for k in range(self.pairs):
            load(self.out / f"pair-{k}" / "aligned")
        count = len(self.folders) + (self.pairs + 1) * len(WAYS) + self.pairs
        exact = _exact(curves)
        return [
            {"name": "stock class", "passed": True, "detail": f"{count} folders loaded, nothing missing or left over"},
            {"name": "same function", "passed": exact < 1e-4,
             "detail": f"largest difference of a probability between a model and itself aligned: {exact:.0e}"},
        ]  # fmt: skip


def _renamed(told: Any, names: Mapping[str, str]) -> Any:
    """The same with short names for models, wherever one is named."""
    if isinstance(told, Mapping):
        return {key: _renamed(value, names) for key, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [_renamed(value, names) for value in told]
    return names.get(told, told) if isinstance(told, str) else told


def _pair(group: Group) -> dict[str, Any]:
    """The accuracies of a pair in one row."""
    from isomerge.demonstration.merging import WAYS

    return {
        "seed": ", ".join(map(str, group.seeds)),
        "parents": [group.accuracy(f"seed {seed}") for seed in group.seeds],
        "ensemble": group.accuracy("ensemble"),
        **{way: group.accuracy(way) for way in WAYS},
    }


def _exact(curves: list[dict[str, Any]]) -> float:
    return max(float(curve["max_probability_difference"]) for curve in curves)


def _notes(curves: list[dict[str, Any]]) -> list[str]:
    def mean(level: str) -> float:
        return statistics.fmean(curve["barrier"][level] for curve in curves)

    return [
        f"loss barrier between the models: {mean('none'):.2f} as they are, {mean('rotation'):.2f} at level rotation, "
        f"{mean('full'):.2f} at level full",
        f"the aligned model predicts what it predicted before (largest difference of a probability: "
        f"{_exact(curves):.0e})",
        "no data was used to align; reconstruct looked at the training images without their labels",
        "every folder was loaded in the stock class",
    ]
