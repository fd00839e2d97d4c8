"""Who may read an output: nobody who may not read all of its inputs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.side_files import is_weight

# Of a class of users: what says that it may read a file, what says that it may enter a folder, and all its rights.
CLASSES = ((stat.S_IRGRP, stat.S_IXGRP, stat.S_IRWXG), (stat.S_IROTH, stat.S_IXOTH, stat.S_IRWXO))


def closed_by(checkpoints: Iterable[Checkpoint], files: Iterable[Path] = ()) -> int:
    """The permission bits that an output made of these must not have; 0 on systems without such bits."""
    if os.name != "posix":
        return 0
    parts = {id(part): part for checkpoint in checkpoints for part in checkpoint.parts()}.values()
    folders = {part.folder for part in parts if part.folder is not None}
    inside = [path for folder in folders for path in _stored(folder)]
    closed = 0
    for may_read, may_enter, rights in CLASSES:
        shut = any(not _mode(folder) & may_enter for folder in folders)
        if shut or any(not _mode(path) & may_read for path in {*inside, *files}):
            closed |= rights
    return closed


def restrict(path: Path, closed: int) -> None:
    """Take rights away from what was just made, before anything is in it."""
    if closed:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~closed)


def restrict_like(path: Path, *others: Path) -> None:
    """Give a new file no more readers than the first of the others that exists."""
    like = next((other for other in others if other.exists()), None)
    if like is not None and os.name == "posix":
        restrict(path, 0o077 & ~_mode(like))


def _stored(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if is_weight(path.name) or path.name == "config.json"]
    except OSError:
        return []


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0o777  # gone, or a broken link: it says nothing about the others
