"""Defects that users met in mergekit, each as a promise here. tests/peers compares with mergekit itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from isomerge.merging.methods import METHODS
from isomerge.merging.run.rows import InMemory, TensorGroup
from models import tensors, vocabulary_of, write_family
from peers.recipes import recipe, weighted
from peers.side_by_side import isomerge, refused, write_recipe


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_family("llama", folder)
    return folder


@pytest.fixture
def models(written: Path, tmp_path: Path) -> Path:
    """Copies that a test may change."""
    return Path(shutil.copytree(written, tmp_path / "models"))


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda text: isomerge(write_recipe(text, models, tmp_path / "recipe.yml"), tmp_path / "out")


@pytest.fixture
def error(models: Path, tmp_path: Path) -> Callable[[str], str]:
    return lambda text: refused(write_recipe(text, models, tmp_path / "recipe.yml"), tmp_path / "out")


def change(folder: Path, **tensors_by_name: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors_by_name}, file, {"format": "pt"})


@pytest.mark.parametrize("elements", range(1, 21))
@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties"])
def test_breadcrumbs_do_not_empty_small_tensors(method: str, elements: int) -> None:
    """With few elements, int(density · n) or the share of outliers used to leave nothing."""
    generator = torch.Generator().manual_seed(elements)
    base, tuned = (torch.randn(elements, generator=generator) for _ in range(2))
    group = TensorGroup("bias", [InMemory(tuned)], InMemory(base))
    for density, gamma in ((0.9, 0.01), (0.5, 0.1), (0.05, 0.01)):
        combine = METHODS[method](group, weight=1.0, density=density, gamma=gamma)
        kept = (combine(group.whole()) != base).sum().item()
        assert kept == max(1, int(density * elements))


def test_a_token_of_zeros_can_be_added(run: Any) -> None:
    tokenizer = {"source": "base", "tokens": {"<new>": {"source": {"kind": "zero"}}}}
    out = run(recipe("linear", weighted(0.5, 0.5), base="a", tokenizer=tokenizer))
    row = vocabulary_of(out)["<new>"]
    found = tensors(out)
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[table][row].eq(0).all() and found[table][:row].ne(0).any()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == row + 1


@pytest.mark.parametrize("method", ["linear", "ties", "slerp", "karcher"])
def test_a_tensor_of_another_shape_is_refused_and_not_skipped(models: Path, error: Any, method: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(models / "b", **{name: torch.zeros(47, 32)})
    base = {"linear": None, "ties": "base", "slerp": "a", "karcher": None}[method]
    text = recipe(method, {"a": {}, "b": {}}, base=base)
    said = error(text)
    assert name in said and "(48, 32)" in said and "(47, 32)" in said


def donor_of(recipe_file: Path, out: Path, hash_seed: int) -> tuple[str, str]:
    """Whose config and whose tokenizer a fresh process with this hash seed writes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "isomerge", "merge", str(recipe_file), "-o", str(out), "--quiet"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return json.loads((out / "config.json").read_text())["donor"], (out / "tokenizer_notes.txt").read_text()


@pytest.mark.slow
def test_the_donor_of_config_and_tokenizer_does_not_depend_on_the_hash_seed(models: Path, tmp_path: Path) -> None:
    for member in ("c", "a", "b"):
        config = json.loads((models / member / "config.json").read_text())
        (models / member / "config.json").write_text(json.dumps({**config, "donor": member}))
        (models / member / "tokenizer_notes.txt").write_text(member)
    order = {"c": {"weight": 1.0}, "a": {"weight": 1.0}, "b": {"weight": 1.0}}
    file = write_recipe(recipe("linear", order), models, tmp_path / "recipe.yml")
    assert {donor_of(file, tmp_path / f"out{seed}", seed) for seed in (1, 2)} == {("c", "c")}


def test_a_weight_of_zero_counts_as_zero(models: Path, run: Any) -> None:
    found, a = tensors(run(recipe("linear", weighted(1.0, 0.0), parameters={"weight": 1.0}))), tensors(models / "a")
    assert all(torch.equal(found[name], a[name]) for name in a)


def test_a_filter_of_zero_counts_as_zero(models: Path, run: Any) -> None:
    weight = [{"filter": "mlp", "value": 0.0}, {"value": 1.0}]
    found = tensors(run(recipe("task_arithmetic", {"a": {"weight": weight}}, base="base")))
    base, a = tensors(models / "base"), tensors(models / "a")
    for name, tensor in found.items():
        assert torch.allclose(tensor, (base if "mlp" in name else a)[name], rtol=0, atol=1e-7), name


def test_a_folder_with_a_plus_in_its_name_is_a_folder(models: Path, tmp_path: Path) -> None:
    (models / "b").rename(models / "b+c")
    text = recipe("linear", {"a": {"weight": 1.0}, "there": {"weight": 1.0}})
    file = write_recipe(text, models, tmp_path / "recipe.yml", there=models / "b+c")
    found, a, b = (tensors(f) for f in (isomerge(file, tmp_path / "out"), models / "a", models / "b+c"))
    assert all(torch.allclose(found[name], (a[name] + b[name]) / 2, rtol=0, atol=1e-7) for name in a)


@pytest.mark.parametrize(
    ("change", "wrong", "meant"),
    [
        ({"parameters": {"normalise": True}}, "normalise", "normalize"),
        ({"base_mode": "$base"}, "base_mode", "base_model"),
        ({"dtyp": "float16"}, "dtyp", "dtype"),
        ({"tokenizer": {"sorce": "union"}}, "sorce", "source"),
        ({"models": [{"model": "$a", "parameters": {"wieght": 1.0}}, {"model": "$b"}]}, "wieght", "weight"),
        ({"models": [{"model": "$a", "parameter": {"weight": 1.0}}, {"model": "$b"}]}, "parameter", "parameters"),
        ({"parameters": {"normalize": [{"flter": "mlp", "value": True}]}}, "flter", "filter"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(
    error: Any, change: dict[str, Any], wrong: str, meant: str
) -> None:
    body = {"merge_method": "linear", "models": [{"model": "$a"}, {"model": "$b"}]}
    said = error(yaml.safe_dump({**body, **change}))
    assert f"'{wrong}'" in said and f"Did you mean '{meant}'?" in said
