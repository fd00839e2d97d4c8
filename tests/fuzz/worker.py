"""One process that damages files and reads them, under a limit of time and memory for each.

The number of an input and the seed of the run give its bytes, so any input can be made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz.readers import READERS, Reader, Seed

SECONDS = 5.0
"""Of the processor, so that other work on the machine makes no hang."""
PATIENCE = 60.0
"""Seconds on the clock, for what waits and does not compute."""
LIMITS = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, PATIENCE))
MEMORY = 1_000_000_000  # bytes of address space that reading one input may take
OUTCOMES = ("accepted", "refused", "raw", "hang", "memory", "laxer")
"""`laxer`: accepted here, and refused by the safetensors library."""


class Hang(BaseException):
    """Reading took too long. No reader may catch it."""


def _too_long(*_: Any) -> None:
    raise Hang


def outcome(reader: Reader, folder: Path) -> tuple[str, str]:
    """What reading a folder comes to, and where it went wrong."""
    from isomerge.errors import IsomergeError

    for number, timer, seconds in LIMITS:
        signal.signal(number, _too_long)
        signal.setitimer(timer, seconds)
    try:
        reader.read(folder)
    except IsomergeError as error:
        with contextlib.suppress(UnicodeEncodeError):
            str(error).encode("utf-8")
            return "refused", ""
        return "raw", f"the message cannot be written: {str(error)[:200]!a}"
    except Hang:
        return "hang", _place()
    except MemoryError:
        return "memory", _place()
    except Exception:
        return "raw", _place()
    finally:
        for _, timer, _ in LIMITS:
            signal.setitimer(timer, 0)
    return ("laxer", "") if reader.safetensors and _refused(folder / reader.safetensors) else ("accepted", "")


def _refused(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except SafetensorError:
        return True
    return False


def _place() -> str:
    """The class of the exception and the last line of ours on the way to it: one finding each."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    frames = [frame for frame in traceback.extract_tb(trace) if "/isomerge/" in frame.filename]
    where = f"{frames[-1].filename.rpartition('/isomerge/')[2]}:{frames[-1].lineno}" if frames else "outside"
    return f"{kind.__name__} at {where}: {str(error)[:120]!a}"


def fill(folder: Path, files: Seed) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def inputs(reader: Reader, name: str, seeds: list[Seed], seed: int, start: int) -> Iterator[tuple[int, Seed]]:
    number = start
    while True:
        yield number, reader.make(seeds, random.Random(f"{seed} {name} {number}"))
        number += 1


def work(
    name: str, seeds: list[Seed], folder: Path, seed: int, start: int, stop: int, until: float,
    state: Any, report: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Read inputs `start` to `stop`, or until the time is over. `state` is shared: number, when it began, counts."""
    warnings.simplefilter("ignore")
    os.environ["TMPDIR"] = str(folder.parent)
    _keep_freed_memory_small()
    limit = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    reader = READERS[name]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, files in inputs(reader, name, seeds, seed, start):
        state[0], state[1] = number, time.monotonic()
        if number >= stop or time.monotonic() > until:
            return
        fill(folder, files)
        what, why = outcome(reader, folder)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if grown * 1024 > MEMORY:
            what, why = "memory", f"the process grew by {grown >> 10} MiB"
        state[2 + OUTCOMES.index(what)] += 1
        if what not in ("accepted", "refused"):
            report({"reader": name, "number": number, "what": what, "why": why})
        if what == "memory":  # its peak would count for all that follow: the next process goes on
            state[0] = number + 1
            return


def _keep_freed_memory_small() -> None:
    """So that what one input took does not count for the next."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def save_finding(where: Path, name: str, seeds: list[Seed], seed: int, finding: dict[str, Any]) -> None:
    """The damaged folder, made again from its number, with what happened beside it."""
    number = finding["number"]
    _, files = next(inputs(READERS[name], name, seeds, seed, number))
    target = where / name / f"{seed}-{number}"
    target.parent.mkdir(parents=True, exist_ok=True)
    fill(target, files)
    target.with_name(f"{target.name}.json").write_text(json.dumps({**finding, "seed": seed}, indent=1) + "\n")
