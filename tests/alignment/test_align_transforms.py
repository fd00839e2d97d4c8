"""Transforms on disk: what was solved once can be applied again, and to other checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import isomerge
from isomerge.errors import AlignmentError, RequestError
from models import difference, logits, model, noisy, same_bytes

FAMILIES = ["vit", "llama", "bert", "gpt2", "qwen3", "mixtral", "neox", "t5"]


@pytest.mark.parametrize("level", ["permutation", "rotation", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_transform_gives_the_same_bytes_without_the_anchor(family: str, level: str, tmp_path: Path) -> None:
    source, anchor = model(family, 1), model(family, 0)
    found = isomerge.align(source, anchor, level=level)
    found.save_transform(tmp_path / "t.safetensors")
    again = isomerge.align(source, transform=tmp_path / "t.safetensors")
    assert {space["gain"] for space in again.report()["spaces"]} == {None}, "nothing was measured"
    first, second = found.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert all(same_bytes(first[n], second[n]) for n in first)
    assert again.report()["distance"]["before"] is None


@pytest.mark.parametrize("family", ["vit", "llama", "bert"])
def test_a_stored_transform_moves_a_fine_tune_of_the_source_without_changing_its_function(
    family: str, tmp_path: Path
) -> None:
    source = model(family, 1)
    isomerge.align(source, model(family, 0)).save_transform(tmp_path / "t.safetensors")
    tuned = noisy(source, 0.03)
    moved = isomerge.align(tuned, transform=tmp_path / "t.safetensors").state_dict()
    assert difference(logits(tuned), logits(tuned, moved)) <= 1e-10


def test_a_transform_of_another_architecture_is_refused(tmp_path: Path) -> None:
    isomerge.align(model("vit", 1), model("vit", 0)).save_transform(tmp_path / "t.safetensors")
    with pytest.raises(RequestError, match="for 'vit' models"):
        isomerge.align(model("bert", 1), transform=tmp_path / "t.safetensors")


def test_a_transform_of_another_size_is_refused_and_names_the_space(tmp_path: Path) -> None:
    isomerge.align(model("vit", 1), model("vit", 0)).save_transform(tmp_path / "t.safetensors")
    with pytest.raises(RequestError, match=r"space ffn\.0 has 7 units"):
        isomerge.align(model("vit", 1, intermediate_size=9), transform=tmp_path / "t.safetensors")


def test_a_damaged_or_missing_transform_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(RequestError, match="there is no such file"):
        isomerge.align(model("vit", 1), transform=path)
    isomerge.align(model("vit", 1), model("vit", 0)).save_transform(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AlignmentError, match="Reading the transform"):
        isomerge.align(model("vit", 1), transform=path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RequestError, match="not a file written by Alignment.save_transform"):
        isomerge.align(model("vit", 1), transform=path)


def test_an_element_outside_its_group_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "t.safetensors"
    isomerge.align(model("vit", 1), model("vit", 0)).save_transform(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["element:residual"] = tensors["element:residual"] * 2
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(AlignmentError, match="element of residual is not a rotation"):
        isomerge.align(model("vit", 1), transform=path)
