"""Fill a folder so that an unfinished one is never mistaken for a model.

Everything is written into a hidden folder inside the output and renamed at the end, config.json last. As long as that
hidden folder holds files and there is no config.json, the output counts as interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from isomerge import system
from isomerge.checkpoint.base import Checkpoint
from isomerge.choices import STAGING
from isomerge.errors import CheckpointError, RequestError

JOURNAL = "journal.jsonl"
STALE = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json|"
    r"isomerge(\.lock)?\.json|report\.html"
)

SIDE = re.compile(
    r"README\.md|mergekit_config\.yml|generation_config\.json|(tokenizer|special_tokens_map|added_tokens|vocab|merges|"
    r"chat_template|preprocessor_config|processor_config|spiece|sentencepiece|video_preprocessor_config)[\w.]*"
)


def was_interrupted(folder: Path) -> bool:
    """Whether a write into this folder stopped midway. A forced write that stopped before it replaced anything leaves
    the older model, with its config.json, complete."""
    return any(path.is_file() for path in (folder / STAGING).rglob("*")) and not (folder / "config.json").exists()


class Staging:
    """`with Staging(out, force=False) as staging:` stage files, then commit. Any exception undoes it all, except that
    an interruption keeps what a run with the same `key` can go on from."""

    def __init__(self, out: Path, *, force: bool, key: str | None = None) -> None:
        """`key` names the work: the staged files of a run that was killed are kept for one that has the same."""
        self.out = out
        self._key = key
        self._folder = out / STAGING
        self._staged: list[str] = []
        self._placed: list[Path] = []
        self._created: list[Path] = []
        self._lock: int | None = None
        self._force = force
        _refuse_occupied(out, force)

    def __enter__(self) -> Staging:
        if not self._force and self._journal_key() not in (None, self._key) and self._journal_notes():
            raise RequestError(
                f"While preparing to write {self.out}: an interrupted run has left finished work of another kind there "
                f"({self._folder}). Run that command again to continue it, name another folder, or set force to "
                "throw it away.",
                keys=("force",),
            )
        try:
            self._make_folders()
            self._lock = _lock_folder(self._folder)
            if self._key is None or self._journal_key() != self._key:
                for leftover in self._folder.iterdir():  # of a write that was killed
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                if self._key is not None:
                    (self._folder / JOURNAL).write_text(json.dumps({"key": self._key}) + "\n", encoding="utf-8")
        except BaseException:
            self._undo()
            raise
        return self

    def create(self, name: str) -> IO[bytes]:
        """Open a file of the output for writing (and reading back), under its temporary name."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._staged.append(name)
        return path.open("w+b")

    def reopen(self, name: str, size: int) -> IO[bytes] | None:
        """The file that an interrupted run staged under this name, if it is whole."""
        path = self._folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
        self._staged.append(name)
        return path.open("r+b")

    def journal(self) -> list[dict[str, Any]]:
        """What an interrupted run noted, without a last line that was cut off."""
        return self._journal_notes() if self._key is not None else []

    def _journal_notes(self) -> list[dict[str, Any]]:
        notes = []
        for line in (self._folder / JOURNAL).read_text(encoding="utf-8").splitlines()[1:]:
            with contextlib.suppress(ValueError):
                notes.append(json.loads(line))
        return notes

    def note(self, **entry: Any) -> None:
        """Add to the journal, in one write, so that a line is there whole or not at all."""
        if self._key is not None:
            with (self._folder / JOURNAL).open("ab", buffering=0) as file:
                file.write((json.dumps(entry) + "\n").encode("utf-8"))

    def _journal_key(self) -> str | None:
        try:
            with (self._folder / JOURNAL).open(encoding="utf-8") as file:
                return str(json.loads(file.readline())["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def commit(self, last: str) -> None:
        """Rename everything to its place in the order it was staged, `last` at the very end."""
        system.sync_folder(self._folder)
        (self.out / "config.json").unlink(missing_ok=True)  # from here on the older model no longer looks finished
        for name in [name for name in self._staged if name != last]:
            self._place(name)
        for path in self.out.iterdir():
            stale = STALE.fullmatch(path.name) or SIDE.fullmatch(path.name)
            if stale and path.name not in self._staged:
                path.unlink()  # of the model that was here: beside another's weights it would be wrong
        system.sync_folder(self.out)
        self._place(last)
        system.sync_folder(self.out)

    def _place(self, name: str) -> None:
        target = self.out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._folder / name, target)
        self._placed.append(target)

    def _make_folders(self) -> None:
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._created.append(folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._key is not None and issubclass(kind, KeyboardInterrupt) and not self._placed:
            if self._lock is not None:
                os.close(self._lock)
        elif kind is not None:
            self._undo()
        elif self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)

    def _undo(self) -> None:
        if self._lock is not None:  # without the lock, the files there belong to another writer
            for path in reversed(self._placed):
                path.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            if self.out in self._created:
                shutil.rmtree(self.out, ignore_errors=True)
            os.close(self._lock)
        for folder in reversed(self._created):
            with contextlib.suppress(OSError):  # gone already, or somebody else has put something in it
                folder.rmdir()


def _refuse_occupied(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RequestError(f"While preparing to write {out}: it is a file and not a folder. Name a new folder.")
    if force or not out.exists() or was_interrupted(out):
        return
    if any(path.name != STAGING for path in out.iterdir()):
        raise RequestError(
            f"While preparing to write {out}: the folder is not empty, and nothing is overwritten unasked. "
            "Name a new folder, or set force to replace the model in it.",
            keys=("force",),
        )


def _lock_folder(folder: Path) -> int:
    """Two writers in one folder would mix their files; the lock goes away with the process, however it ends."""
    try:
        return system.lock_folder(folder)
    except BlockingIOError as error:
        raise CheckpointError(
            f"While preparing to write {folder.parent}: another process is writing into this folder. "
            "Wait until it has finished, or name another folder."
        ) from error


def check_space(out: Path, needed: int) -> None:
    """Raise when the disk that will hold `out` has not enough room, before anything is written."""
    free = _free(out)
    if free < needed:
        raise _full(out, needed, free)


def disk_failure(out: Path, needed: int, error: OSError) -> CheckpointError:
    """What to tell the user about an OSError met while writing `out`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(out, needed, _free(out))
    where = f" ({error.filename})" if error.filename else ""
    return CheckpointError(
        f"While writing {out}: {error.strerror or error}{where}. Nothing was left behind. "
        "Check that the folder can be written to, or name another, then run again."
    )


def refuse_overwrite(out: str | os.PathLike[str], inputs: Iterable[Checkpoint | str | os.PathLike[str]]) -> None:
    """Raise when writing `out` would change an input: the same folder by any name, or a folder inside it."""
    target = Path(out).expanduser().resolve()
    for source in inputs:
        folder = source.folder if isinstance(source, Checkpoint) else Path(source).expanduser()
        if folder is None or not folder.exists():
            continue  # in memory, or on the hub
        resolved = folder.resolve() if folder.is_dir() else folder.resolve().parent
        # A loose weight file in, say, the current folder does not make everything below that folder its own.
        name = source.name if isinstance(source, Checkpoint) else os.fspath(source)
        loose = Path(name).expanduser().is_file() and not (resolved / "config.json").exists()
        if target == resolved or (resolved in target.parents and not loose):
            where = "the folder" if target == resolved else "inside the folder"
            raise RequestError(
                f"While preparing to write {out}: it is {where} of the input {name}, and inputs are never modified. "
                "Name a folder elsewhere."
            )


def _full(out: Path, needed: int, free: int) -> CheckpointError:
    return CheckpointError(
        f"While writing {out}: the disk is full or too small. The output needs {needed:,} bytes "
        f"({needed / 1e9:.1f} GB) and {free:,} bytes ({free / 1e9:.1f} GB) are free; nothing was left behind. "
        "Make room, name a folder on another disk, or ask for a narrower dtype such as bfloat16."
    )


def _free(out: Path) -> int:
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
