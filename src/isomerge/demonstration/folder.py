"""The folder that a demo fills: never somebody else's unasked, and an earlier demo is replaced as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from isomerge.choices import DEMO_MARK
from isomerge.errors import RequestError


def claim(out: Path, names: Iterable[str], *, force: bool = False) -> None:
    """Make `out` ready for these files and folders, or refuse. What an earlier demo wrote is removed, nothing else."""
    require_free(out, force=force)
    for path in _written(out):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    own = [name for name in names if not (out / name).exists()]  # what others made is never removed
    # One name per line, before anything is written: an interrupted demo can be replaced too.
    (out / DEMO_MARK).write_text("".join(f"{name}\n" for name in own), encoding="utf-8")


def require_free(out: Path, *, force: bool = False) -> None:
    """Refuse a folder with anything in it that is not an earlier demo's, and what is no folder."""
    act = f"Running the demo into {out}"
    if out.exists() and not out.is_dir():
        raise RequestError(f"{act}: this is a file. Name a folder with -o.")
    if force or not out.is_dir() or (out / DEMO_MARK).is_file():
        return
    found = sorted(path.name for path in out.iterdir())
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise RequestError(
            f"{act}: the folder is not empty ({', '.join(found[:3])}{more}) and no demo wrote it. "
            "Name another folder with -o, or add --force to write beside what is there."
        )


def _written(out: Path) -> list[Path]:
    """What the mark names and lies in the folder itself: a mark that was tampered with reaches nothing else."""
    mark = out / DEMO_MARK
    names = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    paths = [out / name for name in names if name and name not in (".", "..") and Path(name).name == name]
    return [path for path in paths if path.exists() and not path.is_symlink()]
