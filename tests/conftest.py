"""What every test needs. Models are in models.py, data in samples.py, the command line in commands.py."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models are tiny, and threads only get in each other's way."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are collected where there is such a device, and nowhere else."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("cuda") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("cuda")])
    items[:] = without
