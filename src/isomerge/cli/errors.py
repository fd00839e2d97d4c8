"""From an exception to one paragraph, an exit code and, with `--json`, one object."""

from __future__ import annotations

import errno
import json
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.cli.usage import wrong_usage
from isomerge.errors import IsomergeError

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130

# Which extra of isomerge brings a package that is only imported where it is used.
_EXTRAS = {
    "transformers": "hf",
    "PIL": "hf",
    "sklearn": "demo",
    "ot": "ot",
    "peft": "lora",
    "matplotlib": "report",
    "jinja2": "report",
    "ray": "ray",
    "flwr": "flower",
}

# What a run goes on from: staging.STAGING of a merge and kept.POINTS of a sweep. Importing them would import torch.
RESUMED = (".isomerge-partial", "points.jsonl")
# What is renamed to its place last, so that it stands for a whole folder.
LAST = ("config.json", "adapter_config.json")
# demonstration.run.MARK: a folder of an earlier demo is never in the way of another.
REPLACED = ".isomerge-demo"


@dataclass(frozen=True)
class Output:
    """Where a run writes, and what was there before."""

    path: Path
    names: frozenset[str]
    stamps: tuple[tuple[int, int] | None, ...]

    @classmethod
    def now(cls, path: Path) -> Output:
        names = frozenset(inside.name for inside in path.iterdir()) if path.is_dir() else frozenset()
        places = (path,) if path.is_file() else tuple(path / name for name in LAST)
        return cls(path, names, tuple(_stamp(place) for place in places))

    @property
    def is_complete(self) -> bool:
        """Whether this run has written all of it: the file that comes last is there, and is not the one that was."""
        stamps = Output.now(self.path).stamps
        return any(stamps) and stamps != self.stamps

    @property
    def is_in_the_way(self) -> bool:
        """Whether the same command would now refuse it. With what was there at first it has begun, and would again."""
        if self.path.is_file():
            return True
        return bool(Output.now(self.path).names - self.names) and not (self.path / REPLACED).exists()


def _stamp(path: Path) -> tuple[int, int] | None:
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


_outputs: list[Output] = []


def announce_output(path: Path) -> None:
    """Remember where this run writes, so that an interruption can say what it left there."""
    _outputs.append(Output.now(path))


def forget_outputs() -> None:
    """Start a run with no announced output."""
    _outputs.clear()


def tell(error: Exception, *, as_json: bool, debug: bool, verb: Any = None) -> int:
    """Say what went wrong on stderr (and on stdout as JSON), and return the exit code. `verb` is the command."""
    message, code = _describe(error, verb)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"isomerge: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message, "kind": type(error).__name__, "exit_code": code}))
    return code


def tell_interruption(command: str, *, as_json: bool) -> None:
    """Say that the work was interrupted, what is left of it on disk, and which command goes on."""
    message = f"Interrupted; the inputs were not changed. {_what_is_left(command)}"
    print(f"isomerge: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message, "kind": "KeyboardInterrupt", "exit_code": INTERRUPTED}))


def _what_is_left(command: str) -> str:
    left = [output for output in _outputs if output.path.exists()]
    waiting = [str(output.path / name) for output in left for name in RESUMED if (output.path / name).exists()]
    if waiting:
        return f"What is finished waits in {', '.join(waiting)}; the same command goes on from there: {command}"
    if not left:
        return f"Nothing was left behind; the same command starts again: {command}"
    if all(output.is_complete for output in _outputs):
        return _what_is_missing(left[0].path, command)
    there = ", ".join(str(output.path) for output in left)
    forced = "--force" in shlex.split(command) or not any(output.is_in_the_way for output in left)
    again = "The same command starts again" + ("" if forced else ", with --force where that is in its way")
    return f"What was there or already written stays: {there}. {again}: {command}"


def _what_is_missing(out: Path, command: str) -> str:
    """A model is whole before it is verified, its page drawn from isomerge.json, and pushed."""
    words = shlex.split(command)
    again = f"with --force the same command does all of it again: {command}"
    if words[1] not in ("merge", "align") or not (out / "isomerge.json").exists():
        return f"{out} is complete; what follows the writing was not done: {again}"
    if not (out / "report.html").exists():
        told = f"{out} is complete; only its report is missing: {shlex.join(['isomerge', 'report', str(out)])}"
    else:
        told = f"{out} is complete, with its report."
    return f"{told} (It may not have been pushed; {again})" if "--push" in words else told


def _describe(error: Exception, verb: Any) -> tuple[str, int]:
    if isinstance(error, IsomergeError):
        return " ".join(str(error).split()), error.exit_code
    # Typer carries its own copy of click in new versions and imports click in old ones, so a wrong option is
    # recognised by what such an error can do and not by its class.
    if hasattr(error, "format_message"):
        return wrong_usage(error, verb), int(getattr(error, "exit_code", WRONG_REQUEST))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        place = f" while writing {error.filename}" if error.filename else ""
        return (
            f"The disk is full{place}. No folder that looks finished was left behind and the inputs were not changed; "
            "free some space, or name another disk with -o, and run the same command again.",
            FAILED,
        )
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] in _EXTRAS:
        package = error.name.split(".")[0]
        return (
            f"This needs the package '{package}', which is not installed. "
            f'Install it with: pip install "isomerge[{_EXTRAS[package]}]".',
            FAILED,
        )
    if isinstance(error, OSError):
        return f"A file could not be used: {error}. Check the path and its permissions.", FAILED
    if isinstance(error, MemoryError):
        return "Memory ran out. Set --max-memory (for example 8GB), or close other programs.", FAILED
    return (
        f"Unexpected {type(error).__name__}: {error}. This is a defect of isomerge: "
        "run again with --debug and report the traceback.",
        FAILED,
    )
