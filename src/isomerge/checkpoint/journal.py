"""The journal of a write: which work it is, what is finished, and what was being renamed when it stopped.

One JSON object a line, each appended whole. A line that is cut off or damaged counts as never written, so the worst
that it costs is work done twice; what a later step relies on is on the disk before that step begins.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isomerge import system

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Commit:
    """Staged files on their way to their places, the last of which makes the model complete."""

    files: list[str]
    old: list[str] = field(default_factory=list)
    """Of the model that was there before: moved aside, and back if the commit is undone."""


@dataclass(frozen=True)
class JournalLine:
    """`key` is on the first."""

    key: str | None = None
    tensor: str | None = None
    hash: str | None = None
    vanished: int = 0
    overflow: int = 0
    commit: Commit | None = None
    undone: bool = False


def journal_key(folder: Path) -> str | None:
    """Which work the staged files of a folder belong to, by its first line; raises OSError where there is none."""
    from isomerge.checkpoint.journal_line import read_line

    with (folder / JOURNAL).open("rb") as file:
        first = read_line(file.readline().rstrip(b"\n"))
    return None if first is None else first.key


class Journal:
    """Reading never fails: a journal that says nothing is that of a write that finished nothing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self.exists = False
        self.key: str | None = None
        self.tensors: list[JournalLine] = []
        self.commit: Commit | None = None
        self._read()

    def _read(self) -> None:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError:
            return
        from isomerge.checkpoint.journal_line import read_line  # a new write reads nothing, and needs no pydantic

        entries = [read_line(line) for line in lines[:-1]]  # what no line end follows was cut off
        self.exists = True
        self.key = entries[0].key if entries and entries[0] is not None else None
        for entry in entries[1:]:
            if entry is None:
                continue
            if entry.tensor is not None:
                self.tensors.append(entry)
            if entry.commit is not None or entry.undone:
                self.commit = entry.commit

    def begin(self, key: str | None) -> None:
        """An empty journal of this work."""
        self.key, self.tensors, self.commit = key, [], None
        with self.path.open("wb", buffering=0) as file:
            _write(file.fileno(), {"key": key})
        self.exists = True

    def go_on(self) -> None:
        """End a line that was cut off, so that the next one is not taken for the rest of it."""
        with self.path.open("r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")

    def note(self, *, durable: bool = False, **entry: Any) -> None:
        """Append a line; a durable one is on the disk when this returns."""
        with self.path.open("ab", buffering=0) as file:
            _write(file.fileno(), entry)
            if durable:
                system.sync(file)

    def note_commit(self, commit: Commit) -> None:
        self.note(commit=asdict(commit), durable=True)
        self.commit = commit

    def note_undone(self) -> None:
        self.note(undone=True, durable=True)
        self.commit = None


def signed_line(entry: dict[str, Any]) -> bytes:
    """With a checksum: a damaged line may still look like one that isomerge writes."""
    return (json.dumps({**entry, "check": checksum(entry)}) + "\n").encode("utf-8")


def checksum(entry: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode("utf-8"))


def _write(descriptor: int, entry: dict[str, Any]) -> None:
    left = signed_line(entry)
    while left:  # a disk that is nearly full takes a part
        left = left[os.write(descriptor, left) :]
