"""Recipes: where values come from, slices, parts, dtypes, several documents, and mergekit's own examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models import tensors
from peers.examples import DTYPES, EXAMPLES, MANY, MODULES, PARAMETERS, SLICES
from peers.side_by_side import assert_same_config, assert_same_tensors, isomerge, write_recipe

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_found_where_mergekit_finds_them(both: Any, family: Any, name: str) -> None:
    assert_same_tensors(*both(PARAMETERS[name], family("llama")))


@pytest.mark.parametrize("name", SLICES)
def test_slices_give_what_mergekit_gives(both: Any, family: Any, name: str) -> None:
    ours, theirs = both(SLICES[name], family("llama"))
    assert_same_tensors(ours, theirs)
    assert_same_config(ours, theirs, "num_hidden_layers")


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_slices_of_other_families_give_what_mergekit_gives(both: Any, family: Any, kind: str) -> None:
    ours, theirs = both(SLICES["a deeper stack"], family(kind))
    assert_same_tensors(ours, theirs)
    assert_same_config(ours, theirs, "num_hidden_layers", "n_layer")


@pytest.mark.parametrize("name", MODULES)
def test_parts_of_an_encoder_decoder_give_what_mergekit_gives(both: Any, family: Any, name: str) -> None:
    ours, theirs = both(MODULES[name], family("t5"))
    assert_same_tensors(ours, theirs)
    assert_same_config(ours, theirs, "num_layers", "num_decoder_layers")


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_agree_to_one_rounding(both: Any, family: Any, name: str) -> None:
    ours, theirs = both(DTYPES[name], family("llama"))
    dtypes = {tensor.dtype for tensor in tensors(theirs).values()}
    assert_same_tensors(ours, theirs, tolerance=max(1e-6, *(torch.finfo(dtype).eps for dtype in dtypes)))
    assert_same_config(ours, theirs, "dtype")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_unchanged(both: Any, family: Any, name: str) -> None:
    assert_same_tensors(*both(EXAMPLES[name], family("llama")))


@pytest.mark.parametrize("name", MANY)
def test_several_documents_give_what_mergekit_gives(mergekit: Any, family: Any, tmp_path: Path, name: str) -> None:
    recipe = write_recipe(MANY[name], family("llama"), tmp_path / "recipe.yml")
    theirs = mergekit.merge(recipe, tmp_path / "theirs", intermediate=tmp_path / "between")
    # mergekit writes what lies between to disk, rounded to the recipe's dtype; so much may differ
    assert_same_tensors(isomerge(recipe, tmp_path / "ours"), theirs)
