"""Weights that compute the same are merged to what computes the same."""

from __future__ import annotations

import pytest

import models as tiny
from merging.layerwise.reconstructions import again, data, distance, features, load, moved, reconstruct
from models import mostly_slow


def merged_features(folders, batches, unseen, **options):
    merged = reconstruct(folders, again(batches), **options)
    return features(load(folders[0], merged.state_dict(), **merged.config_changes), unseen)


@pytest.mark.parametrize("name", mostly_slow(["vit", "bert", "mixtral"], "vit"))
def test_moving_both_parents_alike_does_not_change_the_merged_function(name: str) -> None:
    """Exact without a ridge; the ridge is per coordinate, and so follows permutations but not rotations."""
    first = tiny.model(name, 0)
    second = tiny.noisy(first, 0.1)
    batches, unseen = data(first), data(first, 1, seed=9)
    options = {"align": False, "ridge": 1e-8, "floor": 1e-10}
    expected = merged_features([first, second], batches, unseen, **options)
    got = merged_features([moved(first, 3), moved(second, 3)], batches, unseen, **options)
    assert distance(expected, got) < 1e-6


@pytest.mark.parametrize("name", mostly_slow(["vit", "gpt2", "qwen3", "bert", "neox"], "vit"))
def test_a_scrambled_parent_is_aligned_and_gives_the_same_merged_function(name: str) -> None:
    """To 0.5 %: a sibling that was not moved is left where it is, the other is rotated back as far as noise allows."""
    first = tiny.model(name, 0)
    second = tiny.noisy(first, 0.1)
    batches, unseen = data(first), data(first, 1, seed=9)
    expected = merged_features([first, second], batches, unseen)
    assert distance(expected, merged_features([first, moved(second, 5)], batches, unseen)) < 5e-3
    assert distance(expected, merged_features([first, moved(second, 5)], batches, unseen, align=False)) > 0.05


@pytest.mark.slow
def test_a_tied_output_table_is_solved_whether_the_alignment_had_to_separate_it_or_not() -> None:
    """To 2 %: a sibling that was not moved stays tied on disk, one that was cannot; both are merged with two tables."""
    first = tiny.model("t5", 0)
    second = tiny.noisy(first, 0.1)
    batches, unseen = data(first), data(first, 1, seed=9)
    expected = merged_features([first, second], batches, unseen)
    assert distance(expected, merged_features([first, moved(second, 5)], batches, unseen)) < 2e-2
    for align, note in ((True, "tied and are now separate"), (False, "tied to the input table, so it is not solved")):
        merged = reconstruct([first, second], again(data(first, 1)), align=align)
        assert any(note in said for said in merged.report()["notes"])
        assert ("lm_head.weight" in merged.state_dict()) == align
