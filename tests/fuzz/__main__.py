"""`python -m fuzz`: damage files of every kind from a seed, and read them.

Each must give a value or an IsomergeError, within 5 s and 1 GB, and nothing may be accepted as safetensors that the
safetensors library refuses. The counts go into a JSON record, and the exit code is 1 if anything was found. Findings
are saved under build/fuzz; copy them to tests/fuzz/findings, where an ordinary test reads them again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fuzz import readers
from fuzz.machine import about, fast_folder
from fuzz.overseer import Job, read_all
from fuzz.worker import OUTCOMES, fill

OTHERS = ("faults", "architectures")
"""Parts of the attack in modules of their own, each with a function `run(minutes, seed) -> dict` with `failures`."""
SHARE = 0.25
"""Of the time, for each of the others."""


def main() -> int:
    options = _arguments()
    torch.set_num_threads(1)
    others = [name for name in OTHERS if name not in options.without] if options.reader is None else []
    record = _earlier(options)
    scratch = Path(tempfile.mkdtemp(prefix="isomerge-fuzz-", dir=fast_folder()))
    try:
        seeds = _seeds(options, record, scratch)
        for done in _in_processes(options, seeds, others, scratch):
            _enter(done, record, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    record["readers"] = {name: record["readers"][name] for name in readers.READERS if name in record["readers"]}
    counts = record["readers"].values()
    record["total"] = {key: sum(one[key] for one in counts) for key in ("tried", *OUTCOMES)}
    record["seconds"] = round(sum(one["seconds"] for one in counts))
    ran = {key: record[key] for key in about("") if key in record}
    record |= about(options.commit)
    if ran and ran != {key: record[key] for key in ran}:
        record["before"] = [*record.get("before", []), ran]  # what its other counts are of
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    found = len(record["findings"]) + sum(bool(one.get("failures")) for name in others for one in record[name])
    print(f"{record['total']}\n{found} findings; the record is {options.out}")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0, help="of all parts together")
    parser.add_argument("--count", type=int, help="stop after so many inputs over all readers, in each process")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other damage")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the seeds are those from --seed on")
    parser.add_argument(
        "--reader",
        action="append",
        choices=list(readers.READERS),
        help="only this one; its row of the record is replaced",
    )
    parser.add_argument("--without", action="append", choices=OTHERS, default=[], help="leave out a part of the attack")
    parser.add_argument("--add", action="store_true", help="add to the counts of the record, with other seeds")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/record.json"), help="the record")
    parser.add_argument("--commit", help="the commit to record, where there is no git")
    return parser.parse_args()


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The record to enter counts in: a new one, or with --reader the one that is there, whose other rows stay."""
    record: dict[str, Any] = {"readers": {}, "findings": []}
    if (options.reader or options.add) and options.out.is_file():
        record = json.loads(options.out.read_text())
    if options.reader and not options.add:
        record["findings"] = [one for one in record["findings"] if one["reader"] not in options.reader]
        record["readers"] = {name: row for name, row in record["readers"].items() if name not in options.reader}
    return {**record, "not_run": {}}


def _seeds(options: argparse.Namespace, record: dict[str, Any], scratch: Path) -> dict[str, list[readers.Seed]]:
    """Good files of every reader; one that needs a package which is missing is named in the record.

    They are read once here, so that no process has to import anything again."""
    made = {}
    for name in options.reader or readers.READERS:
        try:
            made[name] = readers.READERS[name].seeds()
            for seed in made[name]:
                fill(scratch / "input", seed)
                readers.READERS[name].read(scratch / "input")
        except ImportError as error:
            record["not_run"][name] = str(error)
            print(f"{name} is not run: {error}", flush=True)
    return made


def _in_processes(options: argparse.Namespace, seeds: Any, others: list[str], scratch: Path) -> list[dict[str, Any]]:
    """What each process has done. One that dies is an error, since its counts are lost."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    jobs = []
    for number in range(options.jobs):
        (scratch / str(number)).mkdir()
        given = (options, seeds, others, scratch / str(number), options.seed + number, answers.put)
        jobs.append(context.Process(target=_one_process, args=given))
        jobs[-1].start()
    done = [answers.get() for _ in jobs]
    for job in jobs:
        job.join()
    return done


def _one_process(
    options: argparse.Namespace, seeds: Any, others: list[str], scratch: Path, seed: int, answer: Any
) -> None:
    record: dict[str, Any] = {"seed": seed, "error": "it did not finish"}
    try:
        minutes = options.minutes * (1 - SHARE * len(others))
        record |= read_all(seeds, Job(seed, scratch, 60 * minutes, options.count))
        for name in others:
            record[name] = import_module(f"fuzz.{name}").run(options.minutes * SHARE, seed)
        del record["error"]
    finally:
        answer(record)


def _enter(done: dict[str, Any], record: dict[str, Any], options: argparse.Namespace) -> None:
    if "error" in done:
        raise SystemExit(f"the process with seed {done['seed']} failed: see above")
    for name, row in done["readers"].items():
        earlier = record["readers"].get(name)
        assert earlier is None or not set(earlier["seed"]) & set(row["seed"]), "this seed has been tried"
        record["readers"][name] = row if earlier is None else {key: earlier[key] + value for key, value in row.items()}
    record["findings"] += done["findings"]
    for name in OTHERS:
        if name in done:
            record.setdefault(name, []).append({"seed": done["seed"], **done[name]})


if __name__ == "__main__":
    sys.exit(main())
