"""Every method, on four families: what mergekit gives, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isomerge.merging.methods import METHODS as OURS
from models import FAMILIES
from peers.recipes import METHODS
from peers.side_by_side import assert_same_config, assert_same_tensors, write_recipe

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_method_gives_what_mergekit_gives(
    both: Any, mergekit: Any, family: Any, tmp_path: Path, kind: str, name: str
) -> None:
    ours, theirs = both(METHODS[name], family(kind))

    def in_float64() -> Path:
        recipe = write_recipe(METHODS[name] + "dtype: float64\n", family(kind), tmp_path / "exact.yml")
        return mergekit.merge(recipe, tmp_path / "exact")

    assert_same_tensors(ours, theirs, exact=in_float64)
    assert_same_config(ours, theirs, "architectures", "model_type", "vocab_size", "dtype")


def test_every_method_of_mergekit_is_compared(mergekit: Any) -> None:
    theirs = mergekit.methods()
    assert theirs == {name.split(",")[0] for name in METHODS}
    assert theirs <= set(OURS)
