"""`isomerge.demo`: train models from different seeds, merge them in every way, measure, write, show."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.alignment.api import align
from isomerge.alignment.record import align_record
from isomerge.alignment.result import Alignment
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.choices import DEMO_MARK, LEVELS
from isomerge.connectivity.barrier import height
from isomerge.demonstration import digits as task
from isomerge.demonstration.merging import WAYS, MergedGroup, instructions, load, merge_group
from isomerge.demonstration.picture import picture
from isomerge.errors import RequestError
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.reporting.page import write_report
from isomerge.reporting.record import PAGE, RECORD, write_text
from isomerge.results import Result
from isomerge.system import peak_memory
from isomerge.threads import parallel

MODELS = 3  # merged at once


@dataclass
class DemoResult(Result):
    """What the demo measured; isomerge.json in its folder holds the same."""

    title: str
    pairs: list[dict[str, Any]]
    """The accuracies of every pair: `parents`, `ensemble` and one for each way to merge."""
    curves: list[dict[str, Any]]
    """Loss and accuracy on the line between the models of every pair, and the `barrier`, by level."""
    groups: list[dict[str, Any]]
    """The first pair and the three models: `seeds`, `folder`, `rows` and `layers`."""
    plane: dict[str, Any]
    alignment: dict[str, Any]
    measured: dict[str, Any]
    how: dict[str, Any]
    """How to make everything again."""
    notes: list[str]
    out: str
    seconds: float
    run: dict[str, Any]
    report: str | None
    """The page; None where jinja2 is missing."""


@shows_progress
def demo(out: str | os.PathLike[str], *, seeds: int = 1, force: bool = False, progress: Shown = None) -> DemoResult:
    """Train small image classifiers and merge two, then three, without and with alignment and by their features.

    `seeds` is the number of pairs; pair k comes from the seeds 2k and 2k + 1, the three from 0, 1 and 2. In `out`,
    `models/seed-n` are the trained models, `pair-k` and `three` hold one folder for each way to merge them, and
    `pair-k/aligned` the second model of the pair next to the first. All load in their stock class. `report.html`
    shows the results, `isomerge.json` holds the numbers, `curve.svg` the line between two models. A folder with other
    things in it is refused unless `force`; an earlier demo's is replaced.

    `progress` is called with how much of a stage is done, its total, and "stage: what is being done".
    """
    progress = callback(progress)
    require_types(out=(out, str, os.PathLike), seeds=(seeds, int))
    require_shared_types(force=force, progress=progress)
    if seeds < 1:
        raise RequestError(f"Running the demo: seeds is {seeds}, and at least one pair has to be trained.")
    start = time.perf_counter()
    out = Path(out)
    require_free(out, force=force)
    digits = task.load_digits()
    with parallel() as run:
        models = _train(max(MODELS, 2 * seeds), digits, run, progress)
        folders = ["models", *(f"pair-{k}" for k in range(seeds)), "three"]
        claim(out, [*folders, RECORD, PAGE, "curve.svg"], force=force)
        trained = _TrainedModels(out, digits, models, seeds, progress)
        groups, curves = trained.groups(), trained.curves()
        result = DemoResult(
            title="accuracy on 500 test digits; from 'none' on: one model made from the two",
            pairs=[_pair(group) for group in groups[:-1]],
            curves=curves,
            groups=[groups[0].record(), groups[-1].record()],
            plane=trained.plane(),
            **trained.relations,
            how=instructions([groups[0], groups[-1]], trained.folders, seeds),
            notes=_notes(curves),
            out=str(out),
            seconds=time.perf_counter() - start,
            run={},
            report=None,
        )
        result.run = {
            "seconds": result.seconds,
            "peak_memory_bytes": peak_memory(),
            "checks": trained.checks(curves),
        }
    write_text(out / "curve.svg", picture(curves))
    record = {key: value for key, value in result.to_dict().items() if key != "report"}
    page = write_report(out, {**record, "kind": "demo"})
    result.report = None if page is None else str(page)
    return result


def _train(count: int, digits: task.Digits, run: Any, progress: Progress | None) -> list[Any]:
    """Models of the seeds 0 … count − 1, side by side, one thread inside each: the number of cores changes no byte."""
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


class _TrainedModels:
    """The trained models on disk, and what is done with them."""

    def __init__(
        self, out: Path, digits: task.Digits, models: list[Any], pairs: int, progress: Progress | None
    ) -> None:
        self.out, self.digits, self.models, self.pairs = out, digits, models, pairs
        self.progress = progress or (lambda *_: None)
        self.folders = {seed: out / "models" / f"seed-{seed}" for seed in range(len(models))}
        self.relations: dict[str, Any] = {}
        with quiet_transformers():
            for seed, folder in self.folders.items():
                models[seed].save_pretrained(folder)

    def groups(self) -> list[MergedGroup]:
        """Every pair, then the first three models at once."""
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
        first, second = 2 * k, 2 * k + 1
        self.progress(k, self.pairs + 1, f"measuring: the line between models {first} and {second}")
        a, b = self.models[first], self.models[second]
        alignments: dict[str, Any] = {
            level: align(self.folders[second], anchor=self.folders[first], level=level) for level in LEVELS
        }
        aligned = self.out / f"pair-{k}" / "aligned"
        alignments["full"].save(aligned, force=True, report=False)
        if k == 0:
            self.relations = self._relations(alignments["full"], aligned)
        moved = {"none": b, **{level: alignment.apply(b) for level, alignment in alignments.items()}}
        lines = {level: task.between(a, model, self.digits) for level, model in moved.items()}
        change = task.predict(moved["full"], self.digits) - task.predict(b, self.digits)
        return {
            "seed": f"{first}, {second}",
            "t": [n / (task.POINTS - 1) for n in range(task.POINTS)],
            **{key: {level: line[key] for level, line in lines.items()} for key in ("loss", "accuracy")},
            "barrier": {level: height(line["loss"]) for level, line in lines.items()},
            "max_probability_difference": float(change.abs().max()),
        }

    def _relations(self, alignment: Alignment, folder: Path) -> dict[str, Any]:
        """What the record of an alignment says, with short names for the models."""
        record = align_record(alignment, folder)
        names = {str(path): f"model {seed}" for seed, path in self.folders.items()}
        return {key: _renamed(record[key], names) for key in ("alignment", "measured")}

    def plane(self) -> dict[str, Any]:
        """Through the first pair and its second model where alignment puts it."""
        what = "measuring: the plane through models 0 and 1 and the aligned one"
        self.progress(self.pairs, self.pairs + 1, what)
        moved = self.out / "pair-0" / "aligned"
        corners = {"model 0": self.folders[0], "model 1": self.folders[1], "model 1, aligned": moved}
        return task.loss_plane(corners, self.digits)

    def checks(self, curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Whatever was merged was measured as loaded from its folder; what is left is to load the aligned models."""
        for k in range(self.pairs):
            load(self.out / f"pair-{k}" / "aligned")
        count = len(self.folders) + (self.pairs + 1) * len(WAYS) + self.pairs
        exact = _exact(curves)
        return [
            {"name": "stock class", "passed": True, "detail": f"{count} folders loaded, nothing missing or left over"},
            {"name": "same function", "passed": exact < 1e-4,
             "detail": f"largest difference of a probability between a model and itself aligned: {exact:.0e}"},
        ]  # fmt: skip


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same with short names for models, wherever one is named."""
    if isinstance(value, Mapping):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _pair(group: MergedGroup) -> dict[str, Any]:
    """The accuracies of a pair in one row."""
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


# --- the folder: never somebody else's unasked, and an earlier demo is replaced as a whole ----------------------------
def claim(out: Path, names: Iterable[str], *, force: bool = False) -> None:
    """Make `out` ready for these files and folders, or refuse. What an earlier demo wrote is removed, nothing else."""
    require_free(out, force=force)
    for path in _written(out):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    own = [name for name in names if not (out / name).exists()]  # what others made is never removed
    (out / DEMO_MARK).write_text("".join(f"{name}\n" for name in own), encoding="utf-8")


def require_free(out: Path, *, force: bool = False) -> None:
    """Refuse a folder with anything in it that is not an earlier demo's, and what is no folder."""
    act = f"Running the demo into {out}"
    if out.exists() and not out.is_dir():
        raise RequestError(f"{act}: this is a file. Name a folder.", keys=("out",))
    if force or not out.is_dir() or (out / DEMO_MARK).is_file():
        return
    inside = sorted(path.name for path in out.iterdir())
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise RequestError(
            f"{act}: the folder is not empty ({', '.join(inside[:3])}{more}) and no demo wrote it. "
            "Name another folder, or set force to write beside the files in it.",
            keys=("out", "force"),
        )


def _written(out: Path) -> list[Path]:
    """What the mark names and lies in the folder itself: a mark that was tampered with reaches nothing else."""
    mark = out / DEMO_MARK
    names = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    paths = [out / name for name in names if name and name not in (".", "..") and Path(name).name == name]
    return [path for path in paths if path.exists() and not path.is_symlink()]
