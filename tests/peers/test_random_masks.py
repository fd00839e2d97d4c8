"""Methods that drop at random: mergekit's numbers cannot be repeated, so what is dropped is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from models import tensors
from peers.recipes import recipe
from peers.side_by_side import AGREE, isomerge, write_recipe

pytestmark = pytest.mark.peers
DARE = ("dare_linear", "dare_ties")
DELLA = ("della_linear", "della")
SIGMAS = 5
"""How far a count may lie from its mean: once in a million."""


def kept_and_scale(out: Path, models: Path) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Per tensor: the task vector, which elements survived, and by what they were multiplied."""
    base, tuned, merged = tensors(models / "base"), tensors(models / "a"), tensors(out)
    found = {}
    for name in base:
        delta = tuned[name].double() - base[name].double()
        change = merged[name].double() - base[name].double()
        kept = change != 0
        found[name] = delta, kept, change[kept] / delta[kept]
    return found


def both_masks(method: str, options: dict[str, Any], mergekit: Any, models: Path, folder: Path) -> list[Any]:
    """(their own and our) statistics for one model on a base."""
    text = recipe(method, {"a": {"weight": 1.0, **options}}, base="base", parameters={"normalize": False})
    file = write_recipe(text, models, folder / "recipe.yml")
    folders = isomerge(file, folder / "ours"), mergekit.merge(file, folder / "theirs")
    return [kept_and_scale(out, models) for out in folders]


@pytest.mark.parametrize("method", DARE)
def test_dare_keeps_the_asked_share_and_the_size_of_the_change(
    mergekit: Any, family: Any, tmp_path: Path, method: str
) -> None:
    for found in both_masks(method, {"density": 0.4}, mergekit, family("llama"), tmp_path):
        for name, (delta, kept, scale) in found.items():
            count = delta.numel()
            assert abs(kept.sum().item() - 0.4 * count) <= SIGMAS * (count * 0.4 * 0.6) ** 0.5 + 1, name
            # the kept ones are enlarged until the sum of magnitudes is the one before
            wanted = delta.abs().sum() / delta[kept].abs().sum()
            assert scale.sub(wanted).abs().median() <= 1e-3 * wanted, name


@pytest.mark.parametrize("method", DARE + DELLA)
def test_without_rescaling_the_kept_changes_are_whole(mergekit: Any, family: Any, tmp_path: Path, method: str) -> None:
    text = recipe(
        method,
        {"a": {"weight": 1.0, "density": 0.5}},
        base="base",
        parameters={"normalize": False, "rescale": False},
    )
    file = write_recipe(text, family("llama"), tmp_path / "recipe.yml")
    for out in (isomerge(file, tmp_path / "ours"), mergekit.merge(file, tmp_path / "theirs")):
        for name, tensor in tensors(out).items():
            base, tuned = (tensors(family("llama") / m)[name] for m in ("base", "a"))
            limit = AGREE * tuned.abs().max()
            assert ((tensor == base) | ((tensor - tuned).abs() <= limit)).all(), name


@pytest.mark.parametrize("method", DELLA)
def test_della_keeps_large_changes_more_often(mergekit: Any, family: Any, tmp_path: Path, method: str) -> None:
    density, epsilon = 0.5, 0.3
    options = {"density": density, "epsilon": epsilon}
    for found in both_masks(method, options, mergekit, family("llama"), tmp_path):
        counts = {"small": [0.0, 0.0, 0.0], "large": [0.0, 0.0, 0.0]}
        for delta, kept, _ in found.values():
            rows = delta.reshape(1, -1) if delta.dim() < 2 else delta
            ranks = rows.abs().argsort(dim=1).argsort(dim=1).double()
            chance = density - epsilon + 2 * epsilon * ranks / (rows.shape[1] - 1)
            for half, chosen in (("small", chance < density), ("large", chance >= density)):
                counts[half][0] += kept.reshape(rows.shape)[chosen].sum().item()
                counts[half][1] += chance[chosen].sum().item()
                counts[half][2] += (chance * (1 - chance))[chosen].sum().item()
        for kept_count, expected, variance in counts.values():
            assert abs(kept_count - expected) <= SIGMAS * variance**0.5
        assert counts["large"][0] > 1.5 * counts["small"][0]


@pytest.mark.parametrize("method", DARE + DELLA)
def test_two_models_and_two_tensors_lose_different_elements(family: Any, tmp_path: Path, method: str) -> None:
    """Masks are drawn for every model and tensor anew: shared ones would keep or lose the same places everywhere."""
    models = family("llama")
    masks = {}
    for member in ("a", "b"):
        text = recipe(method, {member: {"weight": 1.0, "density": 0.5}}, base="base", parameters={"normalize": False})
        both = recipe(
            method,
            {"c": {"weight": 0.0, "density": 0.5}, member: {"weight": 1.0, "density": 0.5}},
            base="base",
            parameters={"normalize": False},
        )
        for place, lines in (("first", text), ("second", both)):
            file = write_recipe(lines, models, tmp_path / f"{member}-{place}.yml")
            merged, base = tensors(isomerge(file, tmp_path / f"{member}-{place}")), tensors(models / "base")
            for layer in (0, 1):
                name = f"model.layers.{layer}.mlp.up_proj.weight"
                masks[member, place, layer] = merged[name] != base[name]
    for one in masks:
        for other in masks:
            if one[1:] == ("second", 0) and other[1:] in {("first", 0), ("second", 1)}:
                same = (masks[one] == masks[other]).double().mean().item()
                assert 0.3 < same < 0.7, (one, other)
