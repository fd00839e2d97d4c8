"""Command lines of isomerge, run one after the other, each in a process of its own: it can be stopped at any moment,
and what brings it down leaves the page alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import IO, Any

from isomerge.choices import PROGRESS
from isomerge.errors import RequestError
from isomerge.json_files import JsonError, parse_json

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
ISOMERGE = (sys.executable, "-m", "isomerge")
AS_JSON = "--json"
MOST_WAITING = 8
MOST_SHOWN = 50
PATIENCE = 10.0
"""Seconds in which a process that was asked to stop can put its things in order."""


@dataclass
class StudioJob:
    """One command line and how it goes."""

    number: int
    words: list[str]
    out: str | None
    """The folder it writes, relative to where the page works."""
    state: str = WAITING
    progress: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    began: float | None = None
    seconds: float | None = None
    process: subprocess.Popen[str] | None = field(default=None, repr=False)
    is_stopped: bool = False
    _stage: tuple[str, float, int] | None = field(default=None, repr=False)
    """The stage it is in, when it began, and how much was done then."""

    def to_dict(self) -> dict[str, Any]:
        spent = time.monotonic() - self.began if self.began is not None else None
        return {
            "number": self.number, "verb": self.words[0], "command": command_line(self.words), "out": self.out,
            "state": self.state, "progress": self.progress, "result": self.result, "error": self.error,
            "seconds": self.seconds if self.seconds is not None else spent, "stopping": self.is_stopped,
        }  # fmt: skip

    def moved(self, done: int, total: int, what: str) -> None:
        """Note how far it is. Every stage has its own speed, so the time left is that of the stage."""
        now = time.monotonic()
        if self._stage is None or self._stage[0] != what:
            self._stage = (what, now, done)
        _, since, first = self._stage
        left = (now - since) / (done - first) * (total - done) if done > first else None
        self.progress = {"done": done, "total": total, "what": what, "left": left}


def command_line(words: Sequence[str]) -> str:
    """What to type for the same; the folder of the page is the working directory."""
    return shlex.join(["isomerge", *words])


class Jobs:
    """A queue with one worker."""

    def __init__(
        self, folder: Path, environment: dict[str, str | None] | None = None, program: Sequence[str] = ISOMERGE
    ) -> None:
        """`environment` has variables that the processes get in another way than this one: None removes one."""
        self._folder, self._changes, self._program = folder, environment or {}, program
        self._all: deque[StudioJob] = deque(maxlen=MOST_SHOWN)
        self._queue: Queue[StudioJob | None] = Queue()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, words: Sequence[str], out: str | None = None) -> StudioJob:
        with self._lock:
            if sum(job.state == WAITING for job in self._all) >= MOST_WAITING:
                raise RequestError(f"{MOST_WAITING} runs are waiting already. Wait for one to end, or cancel one.")
            if out is not None and any(job.out == out and job.state in (WAITING, RUNNING) for job in self._all):
                raise RequestError(f"A run that writes {out} is not over. Wait for it, or name another folder.")
            job = StudioJob(next(self._numbers), list(words), out)
            self._all.append(job)
        self._queue.put(job)
        return job

    def records(self) -> list[dict[str, Any]]:
        """The newest first."""
        with self._lock:
            return [job.to_dict() for job in reversed(self._all)]

    def cancel(self, number: int) -> None:
        with self._lock:
            job = next((job for job in self._all if job.number == number), None)
            if job is None:
                raise RequestError(f"There is no run {number}. Reload the page to see those there are.")
            if job.state == WAITING:
                job.state = CANCELLED
            elif job.state == RUNNING:
                job.is_stopped = True
                _interrupt(job.process)

    def close(self) -> str | None:
        """Stop everything, and return the command line that was running."""
        with self._lock:
            running = next((job for job in self._all if job.state == RUNNING), None)
            for job in self._all:
                job.state = CANCELLED if job.state == WAITING else job.state
        self._queue.put(None)
        if running is None:
            return None
        self.cancel(running.number)
        if running.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(PATIENCE)
        return command_line(running.words)

    # --- in the worker's thread ---
    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                if job.state != WAITING:
                    continue
                job.state, job.began = RUNNING, time.monotonic()
            try:
                with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
                    self._run(job, answer)
            except OSError as error:
                job.state, job.error = FAILED, f"The run could not be started: {error}."
            job.seconds = time.monotonic() - (job.began or 0.0)

    def _run(self, job: StudioJob, answer: IO[str]) -> None:
        with self._lock:
            job.process = subprocess.Popen(
                [*self._program, *job.words, AS_JSON],
                cwd=self._folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=answer,
                stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
            if job.is_stopped:
                _interrupt(job.process)
        said: deque[str] = deque(maxlen=20)
        assert job.process.stderr is not None
        with job.process.stderr as lines:
            for line in lines:
                if not _is_progress(line, job):
                    said.append(line)
        code = job.process.wait()
        answer.seek(0)
        _end(job, code, answer.read(), "".join(said).strip())

    def _environment(self) -> dict[str, str]:
        changed = {**os.environ, PROGRESS: "json", "PYTHONUNBUFFERED": "1", **self._changes}
        return {key: value for key, value in changed.items() if value is not None}


def _is_progress(line: str, job: StudioJob) -> bool:
    try:
        found: Any = parse_json(line) if line.startswith("{") else None
        job.moved(int(found["done"]), int(found["total"]), str(found["what"]))
    except (JsonError, KeyError, TypeError, ValueError):
        return False
    return True


def _end(job: StudioJob, code: int, answer: str, said: str) -> None:
    """How it ended, from its exit code and the one object that `--json` prints."""
    try:
        record = json.loads(answer)
    except ValueError:
        record = {}
    if code == 0 and record:
        job.result, job.state = record, DONE
        return
    last = "Stopped before it began." if job.is_stopped else said.rpartition("\n")[2]
    paragraph = str(record.get("error") or last or f"The run ended with exit code {code}.")
    job.error = paragraph.replace(f" {AS_JSON}", "")  # in a command line to repeat, where it is for this page only
    job.state = CANCELLED if job.is_stopped else FAILED


def _interrupt(process: subprocess.Popen[str] | None) -> None:
    """As Ctrl-C does, so that finished work is kept; what does not stop is ended."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
    late = threading.Timer(PATIENCE, process.kill)
    late.daemon = True
    late.start()
