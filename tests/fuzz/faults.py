"""A fault at every I/O call of a command, then the same command again: the same bytes, or the old model untouched.

    python -m fuzz.faults [--jobs 16] [--share 0.1] [--seed 0] [--only merge] [--json docs/faults.json] [--work /fast]

A command runs in a forked child in which the functions of `os` and `open` are counted for paths in one folder. At call
number k a fault happens: the process dies, or dies in the middle of a write, or with the power (what was not synced is
lost), or the call fails with ENOSPC or EIO, or the user presses Ctrl-C. Then the command is run again without a fault.
With a share of 1 all faults at all calls of all commands are tried; several processes take a part of them each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.commands import Command, commands, disk_of, files_of, is_json, run_command, run_here, unnumbered
from fuzz.injector import FAULTS, NOT_TRIED, Injector
from fuzz.machine import about, fast_folder

NAMES = ("merge", "merge past the cache", "merge --force", "align", "align --force", "reconstruct")


@dataclass(frozen=True)
class Rerun:
    """How the command ended after a fault, and what lies there then."""

    code: int
    present: dict[str, str]
    complete: bool
    staging: bool
    told: str


class Attack:
    """One command under every fault at every call."""

    def __init__(self, command: Command, work: Path) -> None:
        self.command, self.work, self.out = command, work, work / "out"
        self.problems: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self.without_effect = 0
        """Faults that say nothing at the call they fell on, such as a full disk while reading."""
        self._reruns: dict[str, Rerun] = {}
        """By the disk it found: many faults leave the same one, such as those while reading."""
        self._reset()
        run_here(command, work)  # so that no child has to import anything
        self._reset()
        code, self.calls = run_command(command, work, Injector(work))
        assert code == 0, (work.parent / "told").read_text()
        self.new = files_of(self.out)
        self._reset()
        self.old = files_of(self.out)
        code, again = run_command(command, work, Injector(work))
        # One thread reads ahead of the one that writes, so their calls may change places.
        assert sorted(map(unnumbered, again)) == sorted(map(unnumbered, self.calls))
        assert files_of(self.out) == self.new

    def _reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.command.old is not None:
            shutil.copytree(self.command.old, self.out)

    def all(self, share: float = 1.0, seed: int = 0, part: int = 0, parts: int = 1) -> dict[str, Any]:
        """Every fault at every call, or at a share of them, or one part of these; what was tried and what was wrong."""
        draw = random.Random(seed)
        every = [(at, fault) for at in range(1, len(self.calls) + 1) for fault in FAULTS]
        drawn = [one for one in every if draw.random() < share]
        # Neighbours stay together, since they often leave the same disk.
        chosen = [one for number, one in enumerate(drawn) if number // 60 % parts == part]
        for number, (at, fault) in enumerate(chosen, start=1):
            self.one(at, fault, seed + at)
            if number % 100 == 0:
                wrong = len(self.problems)
                print(f"{self.command.name}: {number} of {len(chosen)} faults, {wrong} problems", file=sys.stderr)
        return self.record()

    def some(self, seconds: float, seed: int) -> dict[str, Any]:
        """Faults drawn from all of them, for so long and at least one."""
        draw, end = random.Random(seed), time.monotonic() + seconds
        while True:
            at = draw.randint(1, len(self.calls))
            self.one(at, draw.choice(FAULTS), seed + at)
            if time.monotonic() > end:
                return self.record()

    def record(self) -> dict[str, Any]:
        return {
            "command": " ".join(["isomerge", *self.command.words]).replace(f"{self.work.parent}{os.sep}", ""),
            "calls": len(self.calls), "possible": len(self.calls) * len(FAULTS),
            "faults": sum(self.counts.values()) + len(self.problems), "without_effect": self.without_effect,
            "reruns": len(self._reruns),
            "outcomes": dict(sorted(self.counts.items())), "problems": self.problems,
        }  # fmt: skip

    def one(self, at: int, fault: str, seed: int) -> None:
        self._reset()
        code, _ = run_command(self.command, self.work, Injector(self.work, at, fault, seed))
        if code == NOT_TRIED:
            self.without_effect += 1
            return
        where = {"call": at, "what": (self.work.parent / "fault").read_text(), "fault": fault}
        told = (self.work.parent / "told").read_text()
        problem = self._after_the_fault(code, fault, told)
        if problem is None:
            rerun = self._rerun()
            told, problem = rerun.told, self._after_the_rerun(code, rerun)
        if problem is not None:
            print(json.dumps({**where, "problem": problem, "told": told[-600:]}), file=sys.stderr)
            self.problems.append({**where, "problem": problem, "exit": code, "told": told[-600:]})

    def _after_the_fault(self, code: int, fault: str, told: str) -> str | None:
        present = files_of(self.out)
        if "Traceback" in told or "defect" in told or code in (70, -signal.SIGALRM):
            return "a raw exception"
        if code == 0 and present != self.new:
            return "it ended well and the model is not the one it should be"
        came_back = fault not in ("kill", "torn", "power")
        if self.old and came_back and present not in (self.old, self.new) and not self._is_new(present):
            return "neither the old nor the new model is there, though nobody was killed"
        return self._opens(present)

    def _opens(self, present: dict[str, str]) -> str | None:
        """Whoever reads the folder now gets the old model, the new one, or an error."""
        from isomerge.checkpoint import open_checkpoint
        from isomerge.errors import IsomergeError
        from isomerge.evaluation.verify import verify

        try:
            open_checkpoint(self.out)
        except IsomergeError:
            return "the new model is there and does not open" if present == self.new else None
        if present != self.old and not self._is_new(present):
            return "a mix of both models opens"
        record = verify(self.out, deep=False)
        return None if record["verdict"] == "good" else f"verify: {record['problems']}"

    def _is_new(self, present: dict[str, str]) -> bool:
        """Complete, perhaps without the report that is written last, and with the record of before it was verified."""
        aside = {name for name in present if name.endswith(".partial")}
        late = {"report.html", *(["isomerge.json"] if is_json(self.out / "isomerge.json") else [])}
        return all(present.get(name) == digest for name, digest in self.new.items() if name not in late) and (
            present.keys() - aside <= self.new.keys()
        )

    def _rerun(self) -> Rerun:
        """What the same command does on this disk; it is run once for each."""
        found = disk_of(self.work)
        if found not in self._reruns:
            code, _ = run_command(self.command, self.work)
            present = files_of(self.out)
            staging = (self.out / ".isomerge-partial").exists()
            told = (self.work.parent / "told").read_text()
            self._reruns[found] = Rerun(code, present, self._is_new(present), staging, told)
        return self._reruns[found]

    def _after_the_rerun(self, first: int, rerun: Rerun) -> str | None:
        if rerun.code == 0 and rerun.present == self.new:
            outcome = "finished before the fault" if first == 0 else "finished by the same command"
        elif rerun.code == 2 and rerun.complete and (first == 0 or rerun.present == self.new):
            outcome = "finished before the fault"
        else:
            return f"after the rerun (exit {rerun.code}) the model is not the one it should be"
        if rerun.code == 0 and rerun.staging:
            return "the rerun has left its staging folder"
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        return None


def run(minutes: float, seed: int) -> dict[str, Any]:
    """As many faults as fit into the time, over all commands; within a minute there is time for one of them."""
    names = [NAMES[seed % len(NAMES)]] if minutes < 1 else list(NAMES)
    seconds = 60 * minutes / len(names)
    with tempfile.TemporaryDirectory(prefix="isomerge-faults-", dir=fast_folder()) as folder:
        found = _attacked(names, Path(folder), lambda one: one.some(seconds, seed))
    return {"commands": found, "failures": sum(len(one["problems"]) for one in found.values())}


def _attacked(names: list[str], folder: Path, how: Callable[[Attack], dict[str, Any]]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    work = folder.resolve() / "work"
    work.mkdir(parents=True)
    every = commands(work)
    return {name: how(Attack(every[name], work)) for name in names}


def _part(number: int, names: list[str], folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    return _attacked(names, folder / str(number), lambda one: one.all(asked.share, asked.seed, number, asked.jobs))


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What several processes have tried of one command."""
    outcomes: Counter[str] = sum((Counter(part["outcomes"]) for part in parts), Counter())
    sums = {key: sum(part[key] for part in parts) for key in ("faults", "without_effect", "reruns")}
    alike = len({part["calls"] for part in parts}) == 1  # else the parts are not those of one whole
    return {
        **parts[0], **sums,
        "exhaustive": alike and sums["faults"] + sums["without_effect"] == parts[0]["possible"],
        "outcomes": dict(sorted(outcomes.items())),
        "problems": [problem for part in parts for problem in part["problems"]],
    }  # fmt: skip


def main() -> int:
    asked = _arguments()
    began = time.monotonic()
    names = asked.only or list(NAMES)
    import isomerge.cli.app  # noqa: F401  no process has to import it again
    import models  # noqa: F401

    place = tempfile.TemporaryDirectory(prefix="isomerge-faults-", dir=asked.work or fast_folder())
    with place as folder, multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        parts = pool.starmap(_part, [(number, names, Path(folder), asked) for number in range(asked.jobs)], 1)
    found = {name: _joined([part[name] for part in parts]) for name in names}
    for one in found.values():
        one |= {"seed": asked.seed, "seconds": round(time.monotonic() - began), "jobs": asked.jobs}
        one |= about(asked.commit)
    if asked.json is not None:
        known = json.loads(asked.json.read_text())["commands"] if asked.json.is_file() else {}
        known |= found
        record = {"commands": {name: known[name] for name in NAMES if name in known}}
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    for name, one in found.items():
        tried = f"{one['faults']} faults at {one['calls']} calls"
        print(f"{name}: {tried}, {len(one['problems'])} problems, exhaustive: {one['exhaustive']}")
    return 1 if any(one["problems"] for one in found.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz.faults", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--share", type=float, default=1.0, help="of all faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a part of the faults")
    parser.add_argument("--only", action="append", choices=NAMES, help="one command; may be repeated")
    parser.add_argument("--json", type=Path, help="the record; what it holds of other commands stays")
    parser.add_argument("--work", type=Path, help="where the models lie, on a fast disk")
    parser.add_argument("--commit", help="the commit to record, where there is no git")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
