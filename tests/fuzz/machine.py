"""Where the attack runs, and what of."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def fast_folder() -> Path | None:
    """Memory that looks like a disk; None where there is none."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


def about(commit: str | None = None) -> dict[str, str]:
    """For a record: the commit, and the versions that ran it."""
    import torch

    from isomerge import __version__

    if commit is None:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or "unknown"
    return {"commit": commit, "isomerge": __version__, "python": platform.python_version(), "torch": torch.__version__}
