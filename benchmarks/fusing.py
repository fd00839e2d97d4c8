"""What the fusion benchmarks share: ways to make one model of several, the loop that measures them, table and record.

A row is a name, a merge (models, batches, device) → state_dict, and the options of `isomerge.align` if the models are
aligned to the first of them before. To add one, append to `standard_rows(…)` in a benchmark:

    Row("reconstruct, ridge 0.1", reconstructed(2000, ridge=0.1), align={"level": "full", "count": 512})

A judge takes weights and gives a dict of numbers with "loss" among them; given several, it judges their ensemble.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isomerge

State = dict[str, Tensor]
Batches = Callable[[int], Callable[[], Iterator[dict[str, Tensor]]]]
"""A number of images or tokens → a function that gives a fresh iterator over batches of them."""
Merge = Callable[[list[Path], Batches, str], State]
Judge = Callable[[Sequence[State]], dict[str, float]]


@dataclass(frozen=True)
class Row:
    """One way to merge. `align` may hold "count", the amount of data that activations are taken from."""

    name: str
    merge: Merge
    align: Mapping[str, Any] | None = None
    all_at_once: bool = False
    """Also measured on all models together, not only on pairs."""


@dataclass(frozen=True)
class Column:
    title: str
    value: Callable[[dict[str, Any]], float | None]
    digits: int = 1
    unit: str = ""


BARRIER = Column("loss above the parents' mean", lambda row: row["barrier"], 3)
SECONDS = (
    Column("alignment, s", lambda row: row["align_seconds"]),
    Column("merge, s", lambda row: row["merge_seconds"]),
)


# --- ways to merge ----------------------------------------------------------------------------------------------------
def trained(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """How each model was trained, as far as its folder says."""
    notes = [folder / "training.json" for folder in folders]
    return [json.loads(note.read_text()) if note.exists() else {} for note in notes]


def state_of(folder: Path) -> State:
    checkpoint = isomerge.open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def average(models: list[Path], batches: Batches, device: str) -> State:
    return isomerge.merge_state_dicts([state_of(model) for model in models])


def one_parent(models: list[Path], batches: Batches, device: str) -> State:
    return state_of(models[0])


def reconstructed(count: int, **options: Any) -> Merge:
    def merge(models: list[Path], batches: Batches, device: str) -> State:
        return isomerge.merge(models, method="reconstruct", data=batches(count), device=device, **options).state_dict()

    return merge


def regmean(count: int, **options: Any) -> Merge:
    def merge(models: list[Path], batches: Batches, device: str) -> State:
        return isomerge.merge(models, method="regmean", data=batches(count), device=device, **options).state_dict()

    return merge


def fisher(count: int, **options: Any) -> Merge:
    def merge(models: list[Path], batches: Batches, device: str) -> State:
        return isomerge.merge(models, method="fisher", data=batches(count), device=device, **options).state_dict()

    return merge


def standard_rows(
    unit: str,
    *,
    stream: int,
    counts: Sequence[int],
    all_at_once: int,
    start: Mapping[str, Any],
    cache: str = "2GB",
    polish: int = 0,
    learn: Sequence[int] = (),
    learn_from: int = 0,
) -> list[Row]:
    """The rows of every benchmark. `unit` is what data are counted in, `stream` how much of it decides for the residual
    stream, `counts` how much reconstruct sees, `start` the alignment that merges with data begin with, `polish` how
    many steps of the last stage are tried (0: that row is left out), `learn` how many steps an alignment learns, on
    `learn_from` examples; its control is one parent, and one parent drawn to the mean prediction for as many steps."""
    counts = sorted(counts)
    few, some = counts[0], counts[len(counts) // 2]
    found = [
        Row("plain average", average),
        Row("paper (rotation)", average, {"level": "rotation"}),
        Row("paper with scales", average, {"level": "rotation", "scale": True}),
        Row("permutation", average, {"level": "permutation"}),
        Row("full, no data", average, {"level": "full"}),
        Row(f"full, stream from {stream:,} {unit}", average, {"level": "full", "count": stream}),
    ]
    with_data: list[tuple[str, Merge, bool]] = [
        (f"RegMean, {some:,} {unit}", regmean(some), False),
        (f"Fisher, {few:,} {unit}", fisher(few), False),
    ]
    with_data += [
        (f"reconstruct, {count:,} {unit}", reconstructed(count, cache=cache), count == all_at_once) for count in counts
    ]
    for name, merge, together in with_data:
        found.append(Row(f"{name}, not aligned", merge, None, together))
        found.append(Row(f"{name}, aligned", merge, start, together))
    # Joint features need no alignment. Neither gradient step sees a label.
    ways: dict[str, dict[str, int]] = {"": {}, ", refined": {"refine": 200}}
    if polish:
        ways[", refined, polished"] = {"refine": 200, "polish": polish}
    for count in counts:
        for word, steps in ways.items():
            merge = reconstructed(count, features="joint", start="merge", cache=cache, **steps)
            found.append(Row(f"joint features, {count:,} {unit}{word}", merge, None, count == all_at_once))
        if polish:  # what the same data and steps make of one parent alone
            merge = reconstructed(count, start="parent", cache=cache, polish=polish)
            found.append(Row(f"control: one parent, {count:,} {unit}, polished", merge, None, count == all_at_once))
    found.append(Row("control: one parent", one_parent))
    for steps in learn:
        name = f"{steps:,} steps, {learn_from:,} {unit}"
        found.append(Row(f"learned alignment, {name}", average, {"level": "full", "count": learn_from, "learn": steps}))
        control = reconstructed(learn_from, goals="mean", start="parent", polish=steps, cache=cache)
        found.append(Row(f"control: one parent to the mean prediction, {name}", control))
    return found


class Aligner:
    """Models next to the first of them, aligned once for every row that wants them so, and how long that took."""

    def __init__(self, folder: Path, batches: Batches, device: str) -> None:
        self._folder, self._batches, self._device = folder, batches, device
        self._known: dict[str, tuple[Path, float]] = {}

    def __call__(self, models: list[Path], options: Mapping[str, Any] | None) -> tuple[list[Path], float | None]:
        if options is None:
            return models, None
        moved = [self._one(model, models[0], options) for model in models[1:]]
        return [models[0], *(folder for folder, _ in moved)], sum(seconds for _, seconds in moved)

    def _one(self, model: Path, anchor: Path, options: Mapping[str, Any]) -> tuple[Path, float]:
        key = json.dumps([str(model), str(anchor), dict(options)], sort_keys=True)
        if key not in self._known:
            settings = dict(options)
            if count := settings.pop("count", None):
                settings["data"] = self._batches(count)
            start = time.perf_counter()
            alignment = isomerge.align(model, anchor, device=self._device, **settings)
            assert isinstance(alignment, isomerge.Alignment)
            alignment.state_dict()
            seconds = _elapsed(start, self._device)
            out = self._folder / str(len(self._known))
            alignment.save(out)
            self._known[key] = (out, seconds)
        return self._known[key]


def train_all(train: Callable[..., None], jobs: Sequence[tuple[Any, ...]], together: bool) -> None:
    """One after the other, or each in its own process: small models leave most of a GPU idle."""
    if not together:
        for job in jobs:
            train(*job)
        return
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    # As arrays, which are sent; tensors would lie in shared memory, of which containers have little.
    sent = [[part.numpy() if isinstance(part, Tensor) else part for part in job] for job in jobs]
    processes = [context.Process(target=_train_received, args=(train, job)) for job in sent]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("Training failed; see above.")


def _train_received(train: Callable[..., None], job: Sequence[Any]) -> None:
    train(*(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in job))


# --- measuring --------------------------------------------------------------------------------------------------------
def shared_arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, help="models are kept here and used again; --tiny: forgotten if not named")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, help="how many models to train (3; --tiny: 2)")
    parser.add_argument("--together", action="store_true", help="train all seeds at once, one process each")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--pairs", help="as in 0-1,0-2; if not named all pairs, and all models at once")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose name contains one of these texts")
    parser.add_argument("--limit", type=int, help="test on that many images or sequences")
    parser.add_argument("--cache", default="2GB", help="memory that reconstruct may use to run layers only once")
    parser.add_argument("--json", type=Path, help="the record, written after every row; one that is there is continued")
    parser.add_argument("--tiny", action="store_true", help="small models and data: minutes on two CPU cores")
    return parser


def run(
    folders: Sequence[Path],
    rows: Sequence[Row],
    judge: Judge,
    batches: Batches,
    columns: Sequence[Column],
    given: argparse.Namespace,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure what is asked for, print the table, and end with an error if a row failed."""
    if given.tiny:  # on such matrices two threads gain nothing, and wait for each other where other work shares cores
        torch.set_num_threads(1)
    rows = chosen_rows(rows, given.rows)
    parents = [judge([state_of(folder)]) for folder in folders]
    record = open_record(given.json, {**about, **circumstances(given.device)}, parents)
    with tempfile.TemporaryDirectory(dir=given.work) as scratch:
        aligner = Aligner(Path(scratch), batches, given.device)
        for group in groups(len(folders), given.pairs):
            measure(group, folders, rows, judge, batches, aligner, given, record)
    print(table(record, columns))
    if failed := [row for row in record["rows"] if "error" in row]:
        raise SystemExit(f"{len(failed)} rows failed: " + "; ".join(f"{r['row']} of {r['models']}" for r in failed))
    return record


def measure(
    group: Sequence[int],
    folders: Sequence[Path],
    rows: Sequence[Row],
    judge: Judge,
    batches: Batches,
    aligner: Aligner,
    given: argparse.Namespace,
    record: dict[str, Any],
) -> None:
    """Every row for one group of models, and their ensemble."""
    models = [folders[i] for i in group]
    done = {row["row"] for row in record["rows"] if row["models"] == list(group) and "error" not in row}
    together = Row("ensemble", average)
    for row in [together, *rows]:
        if row.name in done or (len(group) > 2 and row is not together and not row.all_at_once):
            continue
        found: dict[str, Any] = {"models": list(group), "row": row.name, "commit": record["commit"]}
        found["align"] = None if row.align is None else dict(row.align)
        try:
            if row is together:
                judged = judge([state_of(model) for model in models])
                aligning, merging = None, None
            else:
                start_models, aligning = aligner(models, row.align)
                start = time.perf_counter()
                state = row.merge(start_models, batches, given.device)
                merging = _elapsed(start, given.device)
                judged = judge([state])
            means = {name: statistics.mean(record["parents"][i][name] for i in group) for name in judged}
            found |= {**judged, "parents": means, "barrier": judged["loss"] - means["loss"]}
            found |= {"align_seconds": aligning, "merge_seconds": merging}
        except Exception as error:  # a row that fails is a result too
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"
        record["rows"] = [r for r in record["rows"] if (r["models"], r["row"]) != (list(group), row.name)] + [found]
        print(_line(found), flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1))


def chosen_rows(rows: Sequence[Row], wanted: Sequence[str] | None) -> list[Row]:
    if not wanted:
        return list(rows)
    if strange := [text for text in wanted if not any(text in row.name for row in rows)]:
        raise SystemExit(f"No row has {strange} in its name. There are: " + "; ".join(row.name for row in rows))
    return [row for row in rows if any(text in row.name for text in wanted)]


def groups(count: int, pairs: str | None) -> list[tuple[int, ...]]:
    """The pairs that were named; else all pairs and, if that is something else, all models together."""
    if pairs:
        named = [tuple(int(number) for number in pair.split("-")) for pair in pairs.split(",")]
        if any(not 0 <= number < count for pair in named for number in pair):
            raise SystemExit(f"--pairs {pairs}: the models are 0 to {count - 1}. Ask for more with --seeds.")
        return named
    every: list[tuple[int, ...]] = list(itertools.combinations(range(count), 2))
    return [*every, tuple(range(count))] if count > 2 else every


def _elapsed(start: float, device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _line(found: Mapping[str, Any]) -> str:
    numbers = {k: round(v, 4) for k, v in found.items() if isinstance(v, float)}
    return f"{'-'.join(map(str, found['models']))} {found['row']}: {found.get('error', numbers)}"


# --- the record and the table -----------------------------------------------------------------------------------------
def circumstances(device: str) -> dict[str, Any]:
    import transformers

    kind = torch.device(device)
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": described.stdout.strip() or "unknown",
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def open_record(path: Path | None, about: Mapping[str, Any], parents: list[dict[str, float]]) -> dict[str, Any]:
    """A new record, or the one at `path` if it is about the same models: its rows are kept."""
    record: dict[str, Any] = {**about, "parents": parents, "rows": []}
    if path is not None and path.exists():
        before = json.loads(path.read_text())
        same = len(before["parents"]) == len(parents) and all(
            math.isclose(old[name], new[name], rel_tol=1e-4)
            for old, new in zip(before["parents"], parents, strict=False)
            for name in new
        )
        if not same:
            raise SystemExit(f"{path} is the record of other models or other test data. Name another file.")
        record["rows"] = before["rows"]
    return record


def table(record: Mapping[str, Any], columns: Sequence[Column]) -> str:
    """Markdown: mean ± standard error over the pairs, then all models at once."""
    lines = [
        "| merged model | " + " | ".join(column.title for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for pairs in (True, False):
        some = [row for row in record["rows"] if (len(row["models"]) == 2) is pairs]
        for name in dict.fromkeys(row["row"] for row in some):
            own = [row for row in some if row["row"] == name]
            sound = [row for row in own if "error" not in row]
            cells = [mean_and_error([c.value(row) for row in sound], c.digits, c.unit) for c in columns]
            label = name if pairs else f"{name}, {len(own[0]['models'])} models"
            label += f" ({len(own) - len(sound)} of {len(own)} failed)" if len(sound) < len(own) else ""
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    names = [name for name in record["parents"][0]]
    parents = "; ".join(f"{name} {', '.join(f'{p[name]:.4g}' for p in record['parents'])}" for name in names)
    count = len({tuple(row["models"]) for row in record["rows"] if len(row["models"]) == 2})
    where = f"{record['device']}, torch {record['torch']}, commit {record['commit']}, {record['date']}"
    return f"parents: {parents}\npairs: {count}; {where}\n\n" + "\n".join(lines)


def mean_and_error(known: Sequence[float | None], digits: int = 1, unit: str = "") -> str:
    """The mean and, of several values, its standard error s/√n with s² the unbiased variance."""
    values = [value for value in known if value is not None]
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}{unit}"
