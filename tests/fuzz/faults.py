"""A fault at every I/O call of a command, then the same command again: the same bytes, or the old model untouched.

    python tests/fuzz/faults.py [--share 0.1] [--seed 0] [--only merge]

A command runs in a forked child in which the functions of `os` and `open` are counted for paths in one folder. At call
number k a fault happens: the process dies, or dies in the middle of a write, or with the power (what was not synced is
lost), or the call fails with ENOSPC or EIO, or the user presses Ctrl-C. Then the command is run again without a fault.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KILLED, NOT_TRIED = 137, 99
FAULTS = ("kill", "torn", "power", "ENOSPC", "EIO", "interrupt")
"""The last three come back to the program as exceptions."""
PAGE = 4096
READS = ("preadv", "pread", "read", "scandir", "listdir")
"""Calls that leave nothing on the disk: these are only tried with faults of their own kind."""
FAULTS_OF_READS = ("kill", "EIO", "interrupt")


# --- in the child -----------------------------------------------------------------------------------------------------
@dataclass
class Injector:
    """Counts calls that concern `root`, and lets call number `at` fail."""

    root: Path
    at: int = 0
    fault: str = "kill"
    seed: int = 0
    calls: list[str] = field(default_factory=list)
    _unsynced: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    _renames: list[tuple[str, str, str | None]] = field(default_factory=list)
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def install(self) -> None:
        for name in ("open", "unlink", "remove", "mkdir", "rmdir", "rename", "replace", "scandir", "listdir"):
            self._patch(name, self._by_path)
        for name in ("write", "pwrite", "fsync", "ftruncate", "posix_fallocate", "preadv", "pread", "read"):
            self._patch(name, self._by_descriptor)
        real = io.open
        self._real["io.open"] = real

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self._inside(file):
                return real(file, mode, *args, **kwargs)
            self._count("file.open", file, lambda: real(file, mode, *args, **kwargs))
            handle = real(file, mode, *args, **kwargs)
            return Watched(handle, self) if set(mode) & set("wa+x") else handle

        io.open = builtins.open = opened  # type: ignore[assignment]

    def _patch(self, name: str, kind: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        if hasattr(os, name):
            real = self._real[name] = getattr(os, name)
            setattr(os, name, kind(name, real))

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            place = path
            if kwargs.get("dir_fd") is not None:
                place = os.path.join(_path_of(kwargs["dir_fd"]), os.fspath(path))
            elif isinstance(path, int):
                place = _path_of(path)
            if not self._inside(place):
                return real(path, *args, **kwargs)
            self._count(name, place, lambda: real(path, *args, **kwargs))
            replaced = self._set_aside(args[0]) if name in ("rename", "replace") else None
            result = real(path, *args, **kwargs)
            if name in ("rename", "replace"):
                self._renames.append((os.path.abspath(path), os.path.abspath(args[0]), replaced))
            return result

        return called

    def _set_aside(self, target: Any) -> str | None:
        """Another name for what a rename replaces, outside of the folder, in case the rename is undone."""
        if not os.path.isfile(target):
            return None
        aside = f"{self.root}.replaced.{os.getpid()}.{len(self._renames)}"
        os.link(target, aside)
        return aside

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            place = _path_of(descriptor)
            if not self._inside(place):
                return real(descriptor, *args, **kwargs)
            torn = None
            if name in ("write", "pwrite"):
                half = bytes(args[0])[: max(1, len(args[0]) // 2)]
                torn = lambda: real(descriptor, half, *args[1:])  # noqa: E731
            self._count(name, place, torn or (lambda: real(descriptor, *args, **kwargs)))
            start = args[1] if name == "pwrite" else os.fstat(descriptor).st_size
            result = real(descriptor, *args, **kwargs)
            self._after(name, descriptor, place, start, result)
            return result

        return called

    def _after(self, name: str, descriptor: int, place: str, start: int, result: Any) -> None:
        state = os.fstat(descriptor)
        key = (state.st_dev, state.st_ino)
        if name in ("write", "pwrite"):
            self._unsynced.setdefault(key, []).append((start, start + result))
        elif name == "posix_fallocate":
            self._unsynced.setdefault(key, [])
        elif name == "fsync" and os.path.isdir(place):
            self._renames = [one for one in self._renames if place not in (os.path.dirname(p) for p in one[:2])]
        elif name == "fsync":
            self._unsynced.pop(key, None)

    def wrote(self, descriptor: int) -> None:
        """A buffered file: everything in it may be lost until it is synced."""
        state = os.fstat(descriptor)
        self._unsynced.setdefault((state.st_dev, state.st_ino), []).append((0, 2**40))

    def _inside(self, path: Any) -> bool:
        try:
            return os.path.abspath(os.fspath(path)).startswith(str(self.root))
        except TypeError:
            return isinstance(path, int) and _path_of(path).startswith(str(self.root))

    def _count(self, name: str, place: Any, torn: Callable[[], Any]) -> None:
        self.calls.append(f"{name} {os.path.relpath(os.fspath(place), self.root)}")
        if len(self.calls) != self.at:
            return
        if name in READS and self.fault not in FAULTS_OF_READS:
            os._exit(NOT_TRIED)
        self._real["io.open"](self.root.with_name("fault"), "w").write(self.calls[-1])
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault in ("ENOSPC", "EIO"):
            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code), os.fspath(place))
        if self.fault == "torn":
            torn()
        if self.fault == "power":
            self._lose()
        os._exit(KILLED)

    def _lose(self) -> None:
        """What was not synced: pages become zeros or the file is cut, and the last renames did not happen."""
        draw = random.Random(self.seed)
        for number in range(draw.randint(0, len(self._renames))):
            source, target, replaced = self._renames[-1 - number]
            if os.path.lexists(target) and not os.path.lexists(source) and os.path.isdir(os.path.dirname(source)):
                self._real["rename"](target, source)
                if replaced is not None:
                    os.link(replaced, target)
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                state = os.lstat(path)
                for start, stop in self._unsynced.get((state.st_dev, state.st_ino), []):
                    self._damage(path, start, min(stop, state.st_size), draw)
                if (state.st_dev, state.st_ino) in self._unsynced and draw.random() < 0.5:
                    self._damage(path, 0, min(PAGE, state.st_size), draw)  # the first page, with its header

    def _damage(self, path: str, start: int, stop: int, draw: random.Random) -> None:
        choice = draw.choice(("keep", "zeros", "first page", "cut"))
        if choice == "keep" or stop <= start:
            return
        with self._real["io.open"](path, "r+b") as file:
            if choice == "cut":
                file.truncate(start)
                return
            file.seek(start)
            file.write(bytes(stop - start if choice == "zeros" else min(PAGE, stop - start)))


class Watched:
    """A file object whose writes are counted."""

    def __init__(self, file: Any, injector: Injector) -> None:
        self._file, self._injector = file, injector

    def write(self, data: Any) -> Any:
        half = data[: max(1, len(data) // 2)]

        def torn() -> None:
            self._file.write(half)
            self._file.flush()

        self._injector._count("file.write", self._file.name, torn)
        result = self._file.write(data)
        self._injector.wrote(self._file.fileno())
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Watched:
        self._file.__enter__()
        return self

    def __exit__(self, *given: Any) -> Any:
        return self._file.__exit__(*given)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


# --- in the parent ----------------------------------------------------------------------------------------------------
@dataclass
class Command:
    """A command line that writes to `out`, in a folder with its inputs, and the model that it replaces."""

    name: str
    words: list[str]
    old: Path | None = None


def run_command(command: Command, work: Path, injector: Injector | None = None) -> tuple[int, list[str]]:
    """Its exit status and the calls it made, from a child in which only this process's memory is shared."""
    log = work.parent / "calls"
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.chdir(work)
            silent = os.open(log.with_name("told"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(silent, descriptor)
            code = _main(command.words, injector)
        finally:
            if injector is not None:
                injector._real.get("io.open", io.open)(log, "w").write("\n".join(injector.calls))
            os._exit(code)
    _, status = os.waitpid(child, 0)
    for aside in work.parent.glob(f"{work.name}.replaced.*"):
        aside.unlink()
    code = os.waitstatus_to_exitcode(status)
    return code, log.read_text().splitlines() if log.exists() else []


def compile_once() -> None:
    """Thousands of children are forked: none of them has to build the command line and the template of the page."""
    import functools

    import jinja2
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)
    compiled = jinja2.Environment.compile
    known: dict[str, Any] = {}

    def compile_known(environment: Any, source: Any, *given: Any, **more: Any) -> Any:
        if source not in known:
            known[source] = compiled(environment, source, *given, **more)
        return known[source]

    jinja2.Environment.compile = compile_known  # type: ignore[method-assign]


def _in_process(command: Command, work: Path) -> None:
    before, arguments = Path.cwd(), sys.argv
    os.chdir(work)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _main(command.words, None)
    finally:
        signal.alarm(0)
        os.chdir(before)
        sys.argv = arguments


def _main(words: list[str], injector: Injector | None) -> int:
    from isomerge.cli import main

    signal.alarm(120)
    sys.argv = ["isomerge", *words]
    if injector is not None:
        injector.install()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _unnumbered(call: str) -> str:
    """Without the number of the process in the name of a file."""
    return re.sub(r"\d+\.partial", "partial", call)


def files_of(folder: Path) -> dict[str, str]:
    """The content of a model folder; the time and memory that a run took are left out."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".isomerge-partial/"):
            found[name] = hashlib.sha256(_lasting(path)).hexdigest()
    return found


def _lasting(path: Path) -> bytes:
    if path.name == "report.html":
        return b""  # made from isomerge.json
    if path.name != "isomerge.json":
        return path.read_bytes()
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return path.read_bytes()  # damaged: no version of it
    return json.dumps({key: value for key, value in record.items() if key != "run"}, sort_keys=True).encode()


def _is_json(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False


class Attack:
    """One command under every fault at every call."""

    def __init__(self, command: Command, work: Path) -> None:
        self.command, self.work, self.out = command, work, work / "out"
        self.problems: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}
        self._reset()
        _in_process(command, work)  # so that no child has to import anything
        self._reset()
        code, self.calls = run_command(command, work, Injector(work))
        assert code == 0, (work.parent / "told").read_text()
        self.new = files_of(self.out)
        self._reset()
        self.old = files_of(self.out)
        code, again = run_command(command, work, Injector(work))
        # One thread reads ahead of the one that writes, so their calls may change places.
        assert sorted(map(_unnumbered, again)) == sorted(map(_unnumbered, self.calls))
        assert files_of(self.out) == self.new

    def _reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        if self.command.old is not None:
            shutil.copytree(self.command.old, self.out)

    def all(self, share: float = 1.0, seed: int = 0) -> dict[str, Any]:
        """Every fault at every call, or at a share of them; what was tried and what went wrong."""
        draw = random.Random(seed)
        for at in range(1, len(self.calls) + 1):
            for fault in FAULTS:
                if draw.random() < share:
                    self.one(at, fault, seed + at)
            if at % 20 == 0:
                tried, wrong = sum(self.counts.values()), len(self.problems)
                place = f"call {at} of {len(self.calls)}"
                print(f"{self.command.name}: {place}, {tried} well, {wrong} not", file=sys.stderr)
        return self._record()

    def _record(self) -> dict[str, Any]:
        return {
            "command": " ".join(["isomerge", *self.command.words]), "calls": len(self.calls),
            "faults": sum(self.counts.values()), "outcomes": dict(sorted(self.counts.items())),
            "problems": self.problems,
        }  # fmt: skip

    def some(self, seconds: float, seed: int) -> dict[str, Any]:
        """Faults drawn from all of them, for so long and at least one."""
        draw, end = random.Random(seed), time.monotonic() + seconds
        while True:
            at = draw.randint(1, len(self.calls))
            self.one(at, draw.choice(FAULTS), seed + at)
            if time.monotonic() > end:
                return self._record()

    def one(self, at: int, fault: str, seed: int) -> None:
        self._reset()
        code, _ = run_command(self.command, self.work, Injector(self.work, at, fault, seed))
        if code == NOT_TRIED:
            return
        where = {"call": at, "what": (self.work.parent / "fault").read_text(), "fault": fault}
        told = (self.work.parent / "told").read_text()
        problem = self._after_the_fault(code, fault, told)
        if problem is None:
            again, _ = run_command(self.command, self.work)
            told = (self.work.parent / "told").read_text()
            problem = self._after_the_rerun(code, again)
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
        late = {"report.html", *(["isomerge.json"] if _is_json(self.out / "isomerge.json") else [])}
        return all(present.get(name) == digest for name, digest in self.new.items() if name not in late) and (
            present.keys() - aside <= self.new.keys()
        )

    def _after_the_rerun(self, first: int, again: int) -> str | None:
        present = files_of(self.out)
        if again == 0 and present == self.new:
            outcome = "finished before the fault" if first == 0 else "finished by the same command"
        elif again == 2 and self._is_new(present) and (first == 0 or present == self.new):
            outcome = "finished before the fault"
        else:
            return f"after the rerun (exit {again}) the model is not the one it should be"
        if again == 0 and (self.out / ".isomerge-partial").exists():
            return "the rerun has left its staging folder"
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        return None


def commands(work: Path) -> dict[str, Command]:
    """The commands, with their inputs in `work` and their data outside of it."""
    import models
    import samples

    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        shutil.copytree(models.model("llama", seed, dtype=models.torch.float32), work / name)
    for name, seed in (("v", 0), ("w", 1)):
        shutil.copytree(models.model("vit", seed, dtype=models.torch.float32), work / name)
    data, outside = samples.digits(count=12), work.parent
    old = outside / "old"
    shutil.copytree(work / "c", old)
    for name in ("chat_template.jinja", "README.md", "notes.txt"):
        (old / name).write_text(f"{name} of the old model")
    shards = ["--shard-size", "900", "--threads", "1"]
    merge = ["merge", "a", "b", "-o", "out", *shards]
    align = ["align", "b", "a", "-o", "out", *shards]
    reconstruct = ["merge", "v", "w", "--method", "reconstruct", "--data", str(data), "-o", "out", "--threads", "1"]
    return {
        "merge": Command("merge", merge),
        "merge --force": Command("merge --force", [*merge, "--force"], old),
        "align": Command("align", align),
        "align --force": Command("align --force", [*align, "--force"], old),
        "reconstruct": Command("reconstruct", reconstruct),
    }


def attack(*, share: float = 1.0, seed: int = 0, only: str | None = None) -> dict[str, Any]:
    """Every command under every fault, or a share of them; a record without problems if all is well."""
    return _attacked(lambda one: one.all(share, seed), only)


def run(minutes: float, seed: int) -> dict[str, Any]:
    """As many faults as fit into the time, over all commands; within a minute there is time for one of them."""
    names = ("merge", "merge --force", "align", "align --force", "reconstruct")
    only = names[seed % len(names)] if minutes < 1 else None
    seconds = 60 * minutes / (1 if only else len(names))
    record = _attacked(lambda one: one.some(seconds, seed), only)
    return {**record, "failures": record["problems"]}


def _attacked(how: Callable[[Attack], dict[str, Any]], only: str | None) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    compile_once()
    with tempfile.TemporaryDirectory(prefix="isomerge-faults-") as scratch:
        work = Path(scratch).resolve() / "work"
        work.mkdir()
        chosen = {name: one for name, one in commands(work).items() if only in (None, name)}
        found = [how(Attack(command, work)) for command in chosen.values()]
    return {
        "faults": sum(one["faults"] for one in found),
        "problems": sum(len(one["problems"]) for one in found),
        "commands": found,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--share", type=float, default=1.0, help="of all faults")
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--only", help="one command")
    asked = given.parse_args()
    record = attack(share=asked.share, seed=asked.seed, only=asked.only)
    print(json.dumps(record, indent=1))
    sys.exit(1 if record["problems"] else 0)
