"""What every test needs. Models are in models.py, data in samples.py, the command line in commands.py."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models are tiny, and threads only get in each other's way."""
    torch.set_num_threads(1)
