"""The demo with a shorter training, run once per session of tests."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge


@dataclass
class Made:
    out: Path
    record: dict[str, Any]
    told: list[tuple[int, int, str]]
    """What it said on the way."""


@cache
def short_demo(epochs: int) -> Made:
    """Neither threads nor random numbers of the caller are touched."""
    from isomerge.demonstration import digits

    folder = Path(tempfile.mkdtemp(prefix="isomerge-demo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "EPOCHS", epochs)
        before = torch.get_num_threads(), torch.random.get_rng_state()
        told: list[tuple[int, int, str]] = []
        record = isomerge.demo(folder / "out", progress=lambda *step: told.append(step))
        assert torch.get_num_threads() == before[0]
        assert torch.equal(torch.random.get_rng_state(), before[1])
    return Made(folder / "out", record, told)
