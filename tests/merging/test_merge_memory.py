"""What a merge says about its memory is its own, and what its workers hold together has a bound."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.memory import Room, in_flight
from models import fingerprint, model, noisy

LAUNCHER = """
import json, subprocess, sys
held = bytearray(900 * 2**20)
done = subprocess.run([sys.executable, "-m", "isomerge", *sys.argv[1:]], stdout=subprocess.PIPE, check=True)
sys.stdout.buffer.write(done.stdout)
"""


@pytest.mark.slow
def test_the_peak_does_not_count_the_program_that_launched_it(tmp_path: Path) -> None:
    """The kernel's account of a process begins with the size of the one that started it."""
    words = ["merge", str(model("llama")), str(noisy(model("llama"))), "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run([sys.executable, "-c", LAUNCHER, *words], capture_output=True, check=True, timeout=300)
    record = json.loads(done.stdout)
    assert 100e6 < record["peak_anonymous_bytes"] < record["peak_memory_bytes"] < 800e6


def test_workers_never_hold_more_than_there_is_room_for() -> None:
    room, lock, held, peak = Room(100), threading.Lock(), 0, 0

    def work(count: int) -> None:
        nonlocal held, peak
        with room.taken(count):
            with lock:
                held += count
                peak = max(peak, held)
            time.sleep(0.002)
            with lock:
                held -= count

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, [30, 60, 10, 5, 100, 45] * 8))
    assert 60 < peak <= 100 and held == 0


def test_what_needs_more_than_there_is_works_alone() -> None:
    room, inside, most = Room(10), 0, 0
    lock = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with room.taken(1000):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(12)))
    assert most == 1


def test_the_bound_holds_in_a_merge_and_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [str(model("llama")), str(noisy(model("llama")))]
    isomerge.merge(pair, threads=1).save(tmp_path / "one" / "out")
    lock, inside, most = threading.Lock(), 0, 0
    pieces = Job.pieces

    def counted(job: Job) -> Iterator[Any]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.005)
        yield from pieces(job)
        with lock:
            inside -= 1

    monkeypatch.setattr(Job, "pieces", counted)
    isomerge.merge(pair, threads=8).save(tmp_path / "many" / "out")
    free, most = most, 0
    monkeypatch.setattr("isomerge.merging.outcome.merged.in_flight", lambda _: 1)
    isomerge.merge(pair, threads=8).save(tmp_path / "bounded" / "out")
    assert free > 4 and most == 1
    one, many, bounded = (fingerprint(tmp_path / name / "out") for name in ("one", "many", "bounded"))
    assert one == many == bounded


def test_the_bound_is_what_max_memory_leaves_or_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isomerge.system.machine_memory", lambda: 64 * 2**30)
    assert in_flight(None) == 16 * 2**30
    monkeypatch.setattr("isomerge.system.machine_memory", lambda: None)
    monkeypatch.setattr("isomerge.system.present_memory", lambda: 3 * 10**8)
    assert in_flight(None) == 2**30 and 5e8 < in_flight("1GB") < 7e8
