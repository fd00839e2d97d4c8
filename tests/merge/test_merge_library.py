"""The library without the command line: state_dicts, modules, and results as inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import isomerge
from align.tiny import model, tensors
from isomerge.errors import CheckpointError, RequestError


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(6, 4, generator=generator).to(dtype),
        "b": torch.randn(4, generator=generator).to(dtype),
        "steps": torch.tensor(seed),
    }


def test_state_dicts_merge_by_any_method() -> None:
    base, a, b = state(0), state(1), state(2)
    found = isomerge.merge_state_dicts([a, b], method="task_arithmetic", base=base, weight=[0.5, 0.25], **{"lambda": 2})
    for name in ("w", "b"):
        change = 0.5 * (a[name].double() - base[name].double()) + 0.25 * (b[name].double() - base[name].double())
        assert torch.allclose(found[name].double(), base[name].double() + 2 * change, atol=1e-6)
    assert int(found["steps"]) == 0


def test_the_dtype_stays_and_the_inputs_too() -> None:
    a, b = state(1, torch.bfloat16), state(2, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in a.items()}
    found = isomerge.merge_state_dicts([a, b])
    assert found["w"].dtype == torch.bfloat16
    assert torch.equal(found["w"], ((a["w"].float() + b["w"].float()) / 2).bfloat16())
    assert all(torch.equal(a[name], tensor) for name, tensor in before.items())


def test_wrong_state_dicts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"do not hold the same tensors \('b'\)"):
        isomerge.merge_state_dicts([state(0), {k: v for k, v in state(1).items() if k != "b"}])
    with pytest.raises(RequestError, match="w has the shapes"):
        isomerge.merge_state_dicts([state(0), {**state(1), "w": torch.zeros(2, 2)}])
    with pytest.raises(RequestError, match="needs a base"):
        isomerge.merge_state_dicts([state(0), state(1)], method="ties")
    with pytest.raises(RequestError, match="Did you mean 'ties'"):
        isomerge.merge_state_dicts([state(0)], method="tise")
    broken = torch.zeros(6, 4)
    broken[2, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"tensor 'w' of model 2.*1 of its 24 values are NaN"):
        isomerge.merge_state_dicts([state(0), {**state(1), "w": broken}])


def test_merging_state_dicts_needs_neither_transformers_nor_scipy() -> None:
    code = (
        "import isomerge, sys, torch\n"
        "isomerge.merge_state_dicts([{'w': torch.zeros(2)}, {'w': torch.ones(2)}])\n"
        "heavy = {'transformers', 'scipy', 'pydantic', 'huggingface_hub', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_merge_is_put_into_a_module_in_place() -> None:
    paths = [model("vit", 0), model("vit", 1)]
    module = AutoModelForImageClassification.from_pretrained(paths[0])
    head = module.classifier.weight
    assert isomerge.merge(paths).load_into(module) is module
    assert module.classifier.weight is head
    a, b = (AutoModelForImageClassification.from_pretrained(path).state_dict() for path in paths)
    for name, tensor in module.state_dict().items():
        assert torch.allclose(tensor, (a[name] + b[name]) / 2, atol=1e-7), name


def test_modules_and_state_dicts_are_models_too(tmp_path: Path) -> None:
    paths = [model("vit", 0), model("vit", 1)]
    module = AutoModelForImageClassification.from_pretrained(paths[1])
    mixed = isomerge.merge([paths[0], module]).state_dict()
    plain = isomerge.merge(paths).state_dict()
    assert all(torch.equal(mixed[name], tensor) for name, tensor in plain.items())
    written = isomerge.merge([paths[0], module]).save(tmp_path / "out")
    assert written.sha256 == isomerge.merge(paths).save(tmp_path / "plain").sha256


def test_documents_feed_each_other_unrounded(tmp_path: Path) -> None:
    """Rounding the model in between to bfloat16 would be seen: the result is that of one formula, rounded once."""
    paths = [model("bert", seed, torch.bfloat16) for seed in range(3)]
    recipe = f"""
name: between
merge_method: linear
models:
- model: {paths[0]}
- model: {paths[1]}
---
merge_method: linear
models:
- model: between
  parameters: {{weight: 2}}
- model: {paths[2]}
"""
    found = isomerge.merge_recipe(recipe).state_dict()
    a, b, c = (tensors(path) for path in paths)
    exact = rounded_twice = total = 0
    for name, tensor in found.items():
        once = ((a[name].double() + b[name].double() + c[name].double()) / 3).bfloat16()
        between = ((a[name].double() + b[name].double()) / 2).bfloat16()
        twice = ((2 * between.double() + c[name].double()) / 3).bfloat16()
        exact, total = exact + int((tensor == once).sum()), total + tensor.numel()
        rounded_twice += int((twice == once).sum())
    # Float32 sums differ from float64 ones in the rare case that lies between two bfloat16 numbers.
    assert exact / total > 0.99 > rounded_twice / total


def test_a_module_with_tied_tables_is_refused_for_weights_that_need_two() -> None:
    folders = [model("gpt2", seed, tie_word_embeddings=True) for seed in (0, 1)]
    merged = isomerge.merge(folders, align=True)
    assert merged.config_changes["tie_word_embeddings"] is False
    module = AutoModelForCausalLM.from_pretrained(folders[0])
    before = module.state_dict()["transformer.wte.weight"].clone()
    with pytest.raises(RequestError, match="need a configuration with tie_word_embeddings=False"):
        merged.load_into(module)
    assert torch.equal(module.state_dict()["transformer.wte.weight"], before)
