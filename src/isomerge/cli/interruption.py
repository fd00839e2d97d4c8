"""Ctrl-C: what a run has left on disk, and which command continues it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from isomerge.choices import DEMO_MARK, POINTS, STAGING

# Written last, so that their presence means a complete folder.
LAST = ("config.json", "adapter_config.json", "model_index.json")


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
        """Whether this run has written all of it: the file that comes last exists and is new."""
        stamps = Output.now(self.path).stamps
        return any(stamps) and stamps != self.stamps

    @property
    def is_in_the_way(self) -> bool:
        """Whether the same command would now refuse it. What was there at first did not stop it."""
        if self.path.is_file():
            return True
        return bool(Output.now(self.path).names - self.names) and not (self.path / DEMO_MARK).exists()


def _stamp(path: Path) -> tuple[int, int] | None:
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


_outputs: list[Output] = []


def announce_output(path: Path) -> None:
    """Remember where this run writes, so that an interruption can say what is left there."""
    _outputs.append(Output.now(path))


def forget_outputs() -> None:
    """Start a run with no announced output."""
    _outputs.clear()


def what_is_left(command: str) -> str:
    """What an interrupted run has left, and how to continue."""
    left = [output for output in _outputs if output.path.exists()]
    resumable = [output.path / name for output in left for name in (STAGING, POINTS) if (output.path / name).exists()]
    if resumable:
        places = ", ".join(map(str, resumable))
        return f"Finished work is in {places}; the same command continues from there: {command}"
    if not left:
        return f"Nothing was left behind; the same command starts again: {command}"
    if all(output.is_complete for output in _outputs):
        return _what_is_missing(left[0].path, command)
    places = ", ".join(str(output.path) for output in left)
    forced = "--force" in shlex.split(command) or not any(output.is_in_the_way for output in left)
    again = "The same command starts again" + ("" if forced else "; add --force if the folder is in its way")
    return f"Files that were there before, or were already written, remain: {places}. {again}: {command}"


def _what_is_missing(out: Path, command: str) -> str:
    """A model is complete before it is verified, reported on and pushed."""
    words = shlex.split(command)
    again = f"with --force the same command starts again: {command}"
    if words[1] not in ("merge", "align") or not (out / "isomerge.json").exists():
        return f"{out} is complete; the steps after writing were not done: {again}"
    if not (out / "report.html").exists():
        left = f"{out} is complete; only its report is missing: {shlex.join(['isomerge', 'report', str(out)])}"
    else:
        left = f"{out} is complete, with its report."
    return f"{left} (It may not have been pushed; {again})" if "--push" in words else left
