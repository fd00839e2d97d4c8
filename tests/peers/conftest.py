"""What every comparison needs: tiny models on disk, and one running mergekit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from models import write_family
from peers.side_by_side import Mergekit, isomerge, write_recipe


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder with `base`, `a`, `b` and `c` of one family, stored in one dtype."""

    @cache
    def written(name: str, dtype: torch.dtype = torch.float32) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        write_family(name, folder, dtype=dtype)
        return folder

    return written


@pytest.fixture(scope="session")
def mergekit() -> Iterator[Mergekit]:
    peer = Mergekit()
    yield peer
    peer.close()


@pytest.fixture
def both(mergekit: Mergekit, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Run one recipe through both programs: the folders of ours and theirs."""

    def run(text: str, models: Path, *options: str) -> tuple[Path, Path]:
        recipe = write_recipe(text, models, tmp_path / "recipe.yml")
        return isomerge(recipe, tmp_path / "ours"), mergekit.merge(recipe, tmp_path / "theirs", *options)

    return run
