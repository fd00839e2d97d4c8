"""What the scripts of this folder share: arguments, resumable cells, the record, and its rendering.

    from runner import Mean, Result, Run, Table, main

    def script(run: Run) -> Result:
        run.settings["images"] = 500                                 # part of every cell's key
        found = run.cell("simple 0-1", lambda: {"accuracy": …})      # computed once, then read from --work
        run.note("OT is left out: the package POT is not installed")
        return Result([Table("accuracy", ["merge", "%"], [["simple", Mean([found["accuracy"]])]])])

    if __name__ == "__main__":
        main("table2", "Merging vision transformers", "Table 2 of the founding paper", script)

With --dry-run nothing is computed: `cell` says what it would do and gives NaN for every number, `run.say` tells of
downloads and training, and nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

# This folder, and the one above: the benchmarks whose training code is shared.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

from results import Map as Map
from results import Mean as Mean
from results import Plot as Plot
from results import Result as Result
from results import Table as Table
from results import finite, to_json

HERE = Path(__file__).resolve().parent
SCALES = ("reduced", "small", "original")
SEEDS = {"reduced": 1, "small": 3, "original": 3}
MACHINE = ("hardware", "software")
RESULTS = HERE.parents[1] / "docs" / "results"


class Planned(dict[str, Any]):
    """What a cell gives in a dry run: any number asked of it is NaN."""

    def __missing__(self, key: str) -> float:
        return math.nan


@dataclass
class Run:
    """What a script is given."""

    name: str
    scale: str
    work: Path
    device: str
    seeds: int
    data: Path | None
    models: Path | None
    out: Path
    dry: bool = False
    finished: bool = False
    """Nothing is computed: the tables are made of the cells that are there."""
    bases: tuple[str, ...] = ()
    """Language models to start from, instead of the scale's."""
    commit: str = "unknown"
    settings: dict[str, Any] = field(default_factory=dict)
    """Whatever changes the numbers: set before the first cell, it is part of every key."""
    notes: list[str] = field(default_factory=list)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those of this run, with their settings, commit and seconds: they go into the record."""

    def cell(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The numbers under this key: from an earlier run with the same scale, device and settings, or computed now."""
        if self.dry:
            self.say(f"would compute: {key}")
            return Planned()
        full, kept = self._full(key), self._kept()
        if self.finished and full not in kept:
            self.note(f"Not finished: {key}.")
            return Planned()
        if full not in kept:
            start = time.perf_counter()
            values = json.loads(json.dumps(compute()))  # through JSON now, so that both ways give the same
            done = {"values": values, "commit": self.commit, "date": _now(), "seconds": time.perf_counter() - start}
            done |= circumstances(self.device)
            self.say(f"{key}: {_short(values)} ({done['seconds']:.1f} s)")
            with locked(self._cells):  # and read again: another process may have written meanwhile
                kept = {**self._kept(), full: done}
                _write(self._cells, kept)
        self.cells[key] = kept[full]
        return dict(kept[full]["values"])

    def known(self, key: str) -> bool:
        """Whether a cell was computed before, with the same scale, device and settings."""
        return self._full(key) in self._kept()

    def _full(self, key: str) -> str:
        about = {"scale": self.scale, "device": self.device, **self.settings}
        return json.dumps([key, finite(about)], sort_keys=True)

    def note(self, text: str) -> None:
        """What is skipped or differs from the paper: printed now, and written into the Markdown."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(f"note: {text}")

    def say(self, text: str) -> None:
        print(f"[{self.name}] {text}", flush=True)

    @property
    def _cells(self) -> Path:
        return self.work / f"{self.name}.cells.json"

    def _kept(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._cells.read_text()) if self._cells.exists() else {}


def main(name: str, title: str, paper: str, script: Callable[[Run], Result], argv: Sequence[str] | None = None) -> None:
    """`paper` says which part of it this repeats, such as "Table 2 of the founding paper"."""
    given = arguments(name, title).parse_args(argv)
    if given.rendered:
        show(json.loads(given.rendered.read_text()), given.out or given.rendered.parent)
        return
    run = prepare(name, given)
    result = script(run)
    if run.dry:
        run.say("dry run: nothing was computed and nothing written")
        return
    record = {
        "name": name,
        "title": title,
        "paper": paper,
        "scale": run.scale,
        "command": command(run),
        **origin(run),
        **to_json(result),
        "notes": run.notes,
        "cells": finite(run.cells),
    }
    run.out.mkdir(parents=True, exist_ok=True)
    _write(run.out / f"{name}.json", record)
    if given.record_only:
        run.say(
            f"{run.out / name}.json written, without page and plots: `python benchmarks/paper/render.py {run.out}` "
            "makes them where matplotlib is installed (isomerge[report])"
        )
        return
    show(record, run.out)


def origin(run: Run) -> dict[str, str]:
    """By which code, where and when the numbers were measured: as the cells say, each may be from another run."""
    now = {"commit": run.commit, "date": _now()}
    if not run.cells:
        return now | circumstances(run.device)
    cells = run.cells.values()
    found = {key: "; ".join(dict.fromkeys(cell.get(key, "unknown") for cell in cells)) for key in ("commit", *MACHINE)}
    return {**found, "date": max(cell["date"] for cell in cells)}


def arguments(name: str, title: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{name}.py", description=title)
    parser.add_argument("--scale", choices=SCALES, help="small with a GPU, else reduced")
    parser.add_argument(
        "--work", type=Path, default=Path("build/paper"), help="models and finished cells are kept here"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, help="reduced: 1; else 3")
    parser.add_argument("--data", type=Path, help="the folder with the data sets; README.md here says what is in it")
    parser.add_argument("--models", type=Path, help="the folder with models to start from, instead of the hub")
    parser.add_argument(
        "--bases", type=lambda text: tuple(text.split(",")), default=(), metavar="NAME,NAME",
        help="language models to start from, as the hub names them, the larger last",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="docs/results; original: docs/results/original; reduced: WORK/results")
    parser.add_argument("--dry-run", action="store_true", help="say what would be downloaded, trained and merged")
    parser.add_argument(
        "--finished", action="store_true", help="compute nothing: tables of the cells that are there, gaps where not"
    )
    parser.add_argument("--record-only", action="store_true", help="write the JSON and neither Markdown nor plot")
    parser.add_argument("--from", dest="rendered", type=Path, metavar="JSON", help="only render this record")
    parser.add_argument("--commit", help="what the record says, where there is no git")
    return parser


def prepare(name: str, given: argparse.Namespace) -> Run:
    device = given.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = given.scale or ("reduced" if device == "cpu" else "small")
    seeds = SEEDS[scale] if given.seeds is None else given.seeds
    if seeds < 1:
        raise SystemExit(f"{name}: --seeds {seeds}: at least one is needed.")
    places = {"small": RESULTS, "original": RESULTS / "original", "reduced": given.work / "results"}
    out = given.out or places[scale]
    there = out / f"{name}.json"
    if there.exists() and not given.dry_run and (held := json.loads(there.read_text())["scale"]) != scale:
        raise SystemExit(f"{name}: {there} holds numbers of scale {held}, not {scale}. Name another folder with --out.")
    if importlib.util.find_spec("matplotlib") is None:
        given.record_only = True  # said at the end, with the record
    if not given.dry_run:
        given.work.mkdir(parents=True, exist_ok=True)
    commit = given.commit or _commit()
    options = {"dry": given.dry_run, "finished": given.finished, "bases": given.bases, "commit": commit}
    run = Run(name, scale, given.work, device, seeds, given.data, given.models, out, **options)
    run.say(f"scale {scale}, {device}, seeds {seeds}, work in {given.work}, results in {out}")
    if scale == "reduced":
        run.note(
            "This is the reduced form: tiny models and few examples. It shows that the script runs, not what is true."
        )
    return run


def show(record: dict[str, Any], out: Path) -> None:
    from render import render

    out.mkdir(parents=True, exist_ok=True)
    render(record, out)
    for claim in record["claims"]:
        print(f"[{record['name']}] {claim}")
    print(f"[{record['name']}] written: {out / record['name']}.md", flush=True)


def command(run: Run) -> str:
    """How to run it again, without the names of this machine's folders."""
    words = ["python", f"benchmarks/paper/{run.name}.py", "--scale", run.scale, "--seeds", str(run.seeds)]
    words += ["--device", run.device]
    words += ["--data", "DATA"] if run.data else []
    words += ["--models", "MODELS"] if run.models else []
    words += ["--bases", ",".join(run.bases)] if run.bases else []
    return " ".join(words)


@lru_cache
def circumstances(device: str) -> dict[str, str]:
    """The machine, under the names of MACHINE."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hardware = f"{cores} CPU cores ({_processor()})"
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name(device)}, {hardware}"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if importlib.util.find_spec("transformers"):
        from importlib.metadata import version

        versions.append(f"transformers {version('transformers')}")
    return {"hardware": hardware, "software": ", ".join(versions)}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _short(values: dict[str, Any]) -> str:
    numbers = {k: round(v, 4) for k, v in values.items() if isinstance(v, (int, float))}
    return ", ".join(f"{key} {value}" for key, value in numbers.items()) or "done"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, value: Any) -> None:
    """Aside, then renamed: an interruption never leaves half a file."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value, indent=1))
    aside.replace(path)
