"""What merging hands back: typed results that can be pickled and copied, and arguments refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import isomerge
from isomerge.checkpoint import Checkpoint, TensorInfo, open_checkpoint, write_checkpoint
from isomerge.errors import CheckpointError, RequestError

COPIES: list[Callable[[Any], Any]] = [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy]


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    folders = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        state = {f"model.layers.{i}.mlp.weight": torch.randn(6, 4, generator=generator) for i in range(2)}
        plan = {name: TensorInfo.of(tensor) for name, tensor in state.items()}
        write_checkpoint(tmp_path / str(seed), plan, state.items(), config={"num_hidden_layers": 2})
        folders.append(tmp_path / str(seed))
    return folders


@pytest.mark.parametrize("copied", COPIES)
def test_a_copied_checkpoint_reads_the_same(models: list[Path], copied: Callable[[Any], Any]) -> None:
    for source in (models[0], models[0] / "model.safetensors", {"w": torch.ones(2)}):
        checkpoint: Checkpoint = open_checkpoint(source)
        name = next(iter(checkpoint.tensors))
        checkpoint.read_rows(name, 0, 1)  # a descriptor is open now
        again = copied(checkpoint)
        assert torch.equal(again.read(name), checkpoint.read(name))
        assert again.side_files() == checkpoint.side_files() and again.identity() == checkpoint.identity()


def test_a_checkpoint_whose_files_have_changed_is_refused(models: list[Path], tmp_path: Path) -> None:
    stored = pickle.dumps(open_checkpoint(models[0]))
    other = {"model.layers.0.mlp.weight": torch.zeros(2, 2)}
    plan = {name: TensorInfo.of(tensor) for name, tensor in other.items()}
    write_checkpoint(models[0], plan, other.items(), config={}, force=True)
    with pytest.raises(CheckpointError, match="has changed in the meantime"):
        pickle.loads(stored)
    (models[0] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="again"):
        pickle.loads(stored)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copied_result_is_the_same_model(models: list[Path], copied: Callable[[Any], Any], tmp_path: Path) -> None:
    merged = isomerge.merge(models[1:], method="dare_ties", base=models[0], density=0.5, seed=3, progress=print)
    again = copied(merged)
    expected = merged.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.tensors())
    written = merged.save(tmp_path / "one")
    assert again.save(tmp_path / "other").sha256 == written.sha256 and copied(written) == written
    assert copied(again.report()).to_dict()["method"] == "dare_ties"


def test_a_result_of_several_documents_can_be_copied(models: list[Path]) -> None:
    first, second, third = models
    text = f"""
name: half
merge_method: linear
models: [{{model: {first}}}, {{model: {second}}}]
---
merge_method: linear
models: [{{model: half}}, {{model: {third}}}]
"""
    merged = isomerge.merge_recipe(text)
    again = pickle.loads(pickle.dumps(merged)).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.tensors())


def test_a_plan_is_typed_and_reads_like_its_json(models: list[Path]) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(model)} for model in models]}
    plan = isomerge.plan(recipe)
    assert plan.tensors == plan["tensors"] == 2 and plan.bytes_written == 2 * 24 * 4
    assert list(plan.to_dict()) == [
        "method", "models", "donor", "tensors", "bytes_read", "bytes_written", "peak_memory_bytes", "seconds",
        "threads", "config_changes", "alignment", "aligning", "data", "notes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("models", "x"), ("models", 3), ("weights", "a"), ("weights", [1, "b"]), ("threads", "2"), ("device", 3),
        ("method", 1), ("align", "x"), ("level", 2), ("sweeps", "3"), ("scale", "a"), ("dtype", 4), ("seed", "1"),
        ("max_memory", 1.5), ("progress", 3), ("repair", "x"), ("calibrate", 2), ("tokenizer", 3),
    ],
)  # fmt: skip
def test_wrong_types_are_refused_by_name(models: list[Path], argument: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"\b{argument} must be"):
        isomerge.merge(**{"models": models, argument: value})


def test_wrong_types_of_recipes_and_state_dicts_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="recipe must be"):
        isomerge.merge_recipe(3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="threads must be"):
        isomerge.plan({}, threads="2")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="models must be"):
        isomerge.merge_state_dicts({"w": torch.ones(1)})  # type: ignore[arg-type]


def test_a_scale_of_numbers_is_the_option_of_the_method(models: list[Path]) -> None:
    """`scale` without numbers is that of the alignment."""
    first, second = (load_file(folder / "model.safetensors") for folder in models[:2])
    mean = isomerge.merge(models[:2], method="swag", scale=0.0).state_dict()
    assert all(torch.equal(mean[name], (first[name] + second[name]) / 2) for name in mean)
    half = isomerge.merge(models[:1], method="passthrough", scale=[0.5]).state_dict()
    assert all(torch.equal(half[name], first[name] / 2) for name in half)
    with pytest.raises(RequestError, match="'scale' is not an option of linear"):
        isomerge.merge(models[:2], scale=0.5)
