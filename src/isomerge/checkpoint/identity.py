"""What tells a file from a changed one: its size, time and place while a run lasts, its content between runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.checkpoint.hashing import hash_file
from isomerge.checkpoint.renaming import LAST, SIDE
from isomerge.checkpoint.stamp import Stamp
from isomerge.errors import CheckpointError

LARGE = 64 * 2**20
"""Bytes above which a file beside the weights is known by its size and time, without reading it."""


def deciding_files(folder: Path) -> dict[Path, Stamp | None]:
    """The configs and the tokenizer of a model's folder as they are now: beside the weights they decide what comes out.
    A loose file of weights has none, whatever lies beside it."""
    if not any((folder / name).is_file() for name in LAST):
        return {}
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"While listing {folder}: {error.strerror or error}. Check that the folder can be read, then run again."
        ) from error
    chosen = [name for name in names if name in LAST or (SIDE.fullmatch(name) and name != "README.md")]
    return {folder / name: Stamp.of(folder / name) for name in chosen}


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything beside the weights, by content: the configs, and the files that a copy of the model would get."""
    if checkpoint.folder is None:
        return {}
    folder = checkpoint.folder
    paths = {*(folder / name for name in LAST), *checkpoint.side_files()}
    return {os.path.relpath(path, folder): _content(path) for path in sorted(paths) if path.is_file()}


def _content(path: Path) -> Any:
    try:
        state = path.stat()
        return hash_file(path) if state.st_size <= LARGE else [state.st_size, state.st_mtime_ns]
    except OSError as error:
        raise CheckpointError(
            f"While reading {path}: {error.strerror or error}. Check that it is still there and readable, then run "
            "again."
        ) from error


def require_unchanged(checkpoints: Iterable[Checkpoint], out: Path, others: Iterable[Path] = ()) -> None:
    """Raise when a file of an input is not the one that was opened: part of the result would be of one, part of the
    other. `others`: files beside the models, such as data, that have changed."""
    parts = [part for checkpoint in checkpoints for part in checkpoint.parts()]
    every = [path for part in parts for path in part.changed()] + list(others)
    gone = [str(path) for path in every if isinstance(path, Path) and not path.exists()]
    if gone:
        raise CheckpointError(
            f"While writing {out}: {gone[0]} was there when it was opened, and now: No such file. Nothing was written; "
            "restore the file, then run again."
        )
    if every:
        names = name_some(sorted({str(path) for path in every}))
        raise CheckpointError(
            f"While writing {out}: {names} changed while it was being read, so the result would be a mix of old and "
            "new. Nothing was written; wait until nobody writes the inputs, then run again."
        )
