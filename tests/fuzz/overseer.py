"""Readers one after the other, each in a worker process that is replaced when it hangs or dies."""

from __future__ import annotations

import multiprocessing
import queue
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.readers import WEIGHTS, Seed
from fuzz.worker import OUTCOMES, PATIENCE, save_finding, work

FINDINGS = Path("build/fuzz/findings")


@dataclass(frozen=True)
class Job:
    """What one process does."""

    seed: int
    scratch: Path
    """Nobody else's."""
    seconds: float
    count: int | None = None


def read_all(seeds: dict[str, list[Seed]], job: Job) -> dict[str, Any]:
    """Every reader for its share of the time; what one leaves over, the others share."""
    weights = {name: WEIGHTS.get(name, 1.0) for name in seeds}
    left, end, count = sum(weights.values()), time.monotonic() + job.seconds, job.count
    record: dict[str, Any] = {"readers": {}, "findings": []}
    for name in seeds:
        share = weights[name] / left
        most = 1 << 62 if count is None else round(count * share)
        until = time.monotonic() + (end - time.monotonic()) * share
        overseer = Overseer(name, seeds[name], job, record["findings"])
        row = record["readers"][name] = overseer.run(most, until)
        count = None if count is None else max(0, count - row["tried"])
        left -= weights[name]
        print(name, row, flush=True)
    return record


class Overseer:
    """Of one reader."""

    def __init__(self, name: str, seeds: list[Seed], job: Job, findings: list[Any]) -> None:
        self._name, self._seeds, self._job, self._findings = name, seeds, job, findings
        self._seen: dict[str, int] = {}

    def run(self, most: int, until: float) -> dict[str, Any]:
        """Workers one after the other: one that hangs or dies is replaced, and the input it had is a finding."""
        context = multiprocessing.get_context("fork")
        state = context.Array("d", 2 + len(OUTCOMES), lock=False)
        began, start = time.monotonic(), 0
        while start < most and time.monotonic() < until:
            reports: Any = context.Queue()
            state[1] = time.monotonic()
            given = (self._name, self._seeds, self._job.scratch / "input", self._job.seed, start, most, until, state)
            process = context.Process(target=work, args=(*given, reports.put))
            process.start()
            ended = ""
            while process.is_alive():
                self._collect(reports)
                process.join(0.2)
                if time.monotonic() - state[1] > 1.2 * PATIENCE:  # inside C code, where no signal arrives
                    process.kill()
                    process.join()
                    ended = "hang"
            self._collect(reports)
            start = int(state[0])
            if ended or process.exitcode:
                what = ended or "memory" if process.exitcode in (-9, 0) else "raw"
                state[2 + OUTCOMES.index(what)] += 1
                why = f"process ended with {process.exitcode}"
                self._enter({"reader": self._name, "number": start, "what": what, "why": why})
                start += 1
        counts = {key: int(state[2 + place]) for place, key in enumerate(OUTCOMES)}
        seconds = round(time.monotonic() - began, 1)
        return {"seed": [self._job.seed], "tried": sum(counts.values()), **counts, "seconds": seconds}

    def _collect(self, reports: Any) -> None:
        while True:
            try:
                self._enter(reports.get(timeout=0.05))
            except queue.Empty:
                return

    def _enter(self, finding: dict[str, Any]) -> None:
        """The first input of each kind of finding is saved, and the others are counted."""
        key = f"{finding['what']} {finding['why'].partition(': ')[0]}"
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] == 1:
            self._findings.append({**finding, "seed": self._job.seed})
            save_finding(FINDINGS, self._name, self._seeds, self._job.seed, finding)
            print("found:", finding, flush=True)
