"""Room on the disk, and inputs that must not be written into."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from isomerge.checkpoint.base import Checkpoint
from isomerge.errors import CheckpointError, RequestError


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
