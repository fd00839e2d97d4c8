"""What a picture needs to be written, asked before the work that it shows."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from isomerge.errors import RequestError

FORMATS = (".svg", ".png")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def require_drawable(plot: str | Path) -> None:
    """Refuse, before any work, a picture that could not be written."""
    path = Path(plot)
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--plot {path}: pictures are .svg or .png. Name such a file.")
    if not path.parent.is_dir():
        raise RequestError(f"--plot {path}: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise RequestError(f"--plot {path}: nothing may be written into {path.parent}. Name another folder.")
    if not can_draw():
        raise RequestError(f"--plot {path}: 'matplotlib' is not installed (pip install isomerge[report]).")
