"""`python -m fuzz`: damage files of every kind from a seed, and read them.

Each must give a value or an IsomergeError, within 5 s and 1 GB, and nothing may be accepted as safetensors that the
safetensors library refuses. The counts go into a JSON record, and the exit code is 1 if anything was found. Findings
are saved under build/fuzz; copy them to tests/fuzz/findings, where an ordinary test reads them again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fuzz import readers
from fuzz.worker import OUTCOMES, SECONDS, save_finding, work

OTHERS = ("faults", "architectures")
"""Parts of the attack in modules of their own, each with a function `run(minutes, seed) -> dict` with `failures`."""
SHARE = 0.25
"""Of the time, for each of the others."""


def main() -> int:
    options = _arguments()
    torch.set_num_threads(1)
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="isomerge-fuzz-", dir=base))
    others = [name for name in OTHERS if _exists(name)] if options.reader is None else []
    record = _earlier(options)
    try:
        minutes = options.minutes * (1 - SHARE * len(others))
        _all_readers(options, scratch, 60 * minutes, record)
        for name in others:
            record[name] = import_module(f"fuzz.{name}").run(options.minutes * SHARE, options.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    record["readers"] = {name: record["readers"][name] for name in readers.READERS if name in record["readers"]}
    counts = record["readers"].values()
    record["total"] = {key: sum(one[key] for one in counts) for key in ("tried", *OUTCOMES)}
    record["seconds"] = round(sum(one["seconds"] for one in counts))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    found = len(record["findings"]) + sum(bool(record[name].get("failures")) for name in others)
    print(f"{record['total']}\n{found} findings; the record is {options.out}")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0, help="of all parts together")
    parser.add_argument("--count", type=int, help="stop after so many inputs over all readers")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other damage")
    parser.add_argument(
        "--reader",
        action="append",
        choices=list(readers.READERS),
        help="only this one; its row of the record is replaced",
    )
    parser.add_argument("--add", action="store_true", help="add to the counts of the record, with another seed")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/record.json"), help="the record")
    return parser.parse_args()


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """The record to enter counts in: a new one, or with --reader the one that is there, whose other rows stay."""
    record: dict[str, Any] = {"readers": {}, "findings": []}
    if (options.reader or options.add) and options.out.is_file():
        record = json.loads(options.out.read_text())
    if options.reader and not options.add:
        record["findings"] = [one for one in record["findings"] if one["reader"] not in options.reader]
    return record


def _together(earlier: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """The counts of several seeds."""
    if earlier is None:
        return row
    assert not set(earlier["seed"]) & set(row["seed"]), "this seed has been tried"
    return {key: earlier[key] + value for key, value in row.items()}


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"fuzz.{name}") is not None


def _all_readers(options: argparse.Namespace, scratch: Path, seconds: float, record: dict[str, Any]) -> None:
    chosen = options.reader or list(readers.READERS)
    weights = {name: readers.WEIGHTS.get(name, 1.0) for name in chosen}
    readers.SCRATCH[:] = [scratch]
    seeds = {}
    for name in chosen:
        (scratch / name).mkdir()
        seeds[name] = readers.READERS[name].seeds(scratch / name)
    left, end = sum(weights.values()), time.monotonic() + seconds
    count = options.count
    for name in chosen:  # what one leaves over, the others share
        share = weights[name] / left
        most = 1 << 62 if count is None else round(count * share)
        until = time.monotonic() + (end - time.monotonic()) * share
        row = _one_reader(name, seeds[name], scratch, options, most, until, record["findings"])
        record["readers"][name] = _together(record["readers"].get(name), row) if options.add else row
        count = None if count is None else max(0, count - row["tried"])
        left -= weights[name]
        print(name, row, flush=True)


def _one_reader(
    name: str, seeds: Any, scratch: Path, options: argparse.Namespace, most: int, until: float, findings: list[Any]
) -> dict[str, Any]:
    """Run workers one after the other: one that hangs or dies is replaced, and the input it had is a finding."""
    context = multiprocessing.get_context("fork")
    state = context.Array("d", 2 + len(OUTCOMES), lock=False)
    began, start = time.monotonic(), 0
    seen: dict[str, int] = {}
    while start < most and time.monotonic() < until:
        reports: Any = context.Queue()
        state[1] = time.monotonic()
        process = context.Process(
            target=work,
            args=(name, seeds, scratch / "input", options.seed, start, most, until, state, reports.put),
        )
        process.start()
        ended = ""
        while process.is_alive():
            _collect(reports, name, seeds, options, findings, seen)
            process.join(0.2)
            if time.monotonic() - state[1] > 2 * SECONDS:  # inside C code, where no signal arrives
                process.kill()
                process.join()
                ended = "hang"
        _collect(reports, name, seeds, options, findings, seen)
        start = int(state[0])
        if ended or process.exitcode:
            what = ended or "memory" if process.exitcode in (-9, 0) else "raw"
            state[2 + OUTCOMES.index(what)] += 1
            finding = {"reader": name, "number": start, "what": what, "why": f"process ended with {process.exitcode}"}
            _enter(finding, seeds, options, findings, seen)
            start += 1
    counts = {key: int(state[2 + place]) for place, key in enumerate(OUTCOMES)}
    return {
        "seed": [options.seed],
        "tried": sum(counts.values()),
        **counts,
        "seconds": round(time.monotonic() - began, 1),
    }


def _collect(reports: Any, name: str, seeds: Any, options: Any, findings: list[Any], seen: dict[str, int]) -> None:
    while True:
        try:
            _enter(reports.get(timeout=0.05), seeds, options, findings, seen)
        except queue.Empty:
            return


def _enter(finding: dict[str, Any], seeds: Any, options: Any, findings: list[Any], seen: dict[str, int]) -> None:
    """The first input of each kind of finding is saved, and the others are counted."""
    key = f"{finding['what']} {finding['why'].partition(': ')[0]}"
    seen[key] = seen.get(key, 0) + 1
    if seen[key] == 1:
        findings.append(finding)
        save_finding(Path("build/fuzz/findings"), finding["reader"], seeds, options.seed, finding)
        print("found:", finding, flush=True)


if __name__ == "__main__":
    sys.exit(main())
