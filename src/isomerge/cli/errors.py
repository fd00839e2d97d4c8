"""From an exception to one paragraph, an exit code and, with `--json`, one object."""

from __future__ import annotations

import errno
import json
import sys
import traceback
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

_outputs: list[Path] = []


def announce_output(path: Path) -> None:
    """Remember where this run writes, so that an interruption can say what it left there."""
    _outputs.append(path)


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
    left = [path for path in _outputs if path.exists()]
    waiting = [str(path / name) for path in left for name in RESUMED if (path / name).exists()]
    if waiting:
        rest = f"What is finished waits in {', '.join(waiting)}; the same command goes on from there: {command}"
    elif left:
        there = ", ".join(map(str, left))
        rest = (
            f"What was there or already written stays: {there}. The same command starts again, with --force where "
            f"that folder is in its way: {command}"
        )
    else:
        rest = f"Nothing was left behind; the same command starts again: {command}"
    message = f"Interrupted; the inputs were not changed. {rest}"
    print(f"isomerge: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": message, "kind": "KeyboardInterrupt", "exit_code": INTERRUPTED}))


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
