"""Published recipes and command lines, unchanged, through `mergekit-yaml` of both programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch

from models import tensors, vocabulary_of
from peers.real_world import PUBLISHED
from peers.rounding import compared
from peers.side_by_side import assert_same_config, by_token, mergekit_yaml, write_recipe
from peers.stage import set_stage

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_gives_what_mergekit_gives(mergekit: Any, tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    names = set_stage(published, tmp_path)
    recipe = write_recipe(published.recipe, tmp_path / "models", tmp_path / "recipe.yml", **names)
    flags = Template(published.flags).substitute(names).split()
    ours, theirs = mergekit_yaml(recipe, tmp_path / "ours", *flags), mergekit.merge(recipe, tmp_path / "theirs", *flags)
    assert_same_config(ours, theirs, "num_hidden_layers", "vocab_size", "dtype", "architectures")
    assert vocabulary_of(ours).keys() == vocabulary_of(theirs).keys()
    exact = Path(shutil.copyfile(recipe, tmp_path / "exact.yml"))
    exact.write_text(recipe.read_text().replace(f"dtype: {published.dtype}", "dtype: float64"))
    truth = mergekit.merge(exact, tmp_path / "truth", *flags)
    mine, other, wanted = (by_token(folder) for folder in (ours, theirs, truth))
    assert mine.keys() == other.keys() == wanted.keys()
    assert {tensor.dtype for tensor in mine.values()} == {tensor.dtype for tensor in other.values()}
    if "dare" in published.recipe:
        assert_same_size_of_the_change(mine, other, tensors(tmp_path / "models" / "base"))
        return
    rows = [compared(mine[name], other[name], wanted[name]) for name in wanted]
    equal, apart, theirs_apart = (
        torch.cat(column).double().mean().item() for column in list(zip(*rows, strict=True))[:3]
    )
    assert apart <= published.apart and theirs_apart <= published.apart
    assert equal == 1 or "passthrough" not in published.recipe or "adapter" in published.recipe


def assert_same_size_of_the_change(ours: dict[str, Any], theirs: dict[str, Any], base: dict[str, Any]) -> None:
    """What is dropped is drawn anew in every run of mergekit; how much the merge changes is not."""
    sizes = [
        sum((one[name].double() - base[name].double()).square().sum().item() for name in base) for one in (ours, theirs)
    ]
    assert abs(sizes[0] - sizes[1]) < 0.03 * sizes[1]
