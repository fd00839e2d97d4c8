"""Scaling by depth: LARV's factors against their formulas in numpy, and LiNeS as a gradient of lambda."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isomerge
from cli.invoke import told
from isomerge.errors import RequestError
from models import model, tensors

Array = np.ndarray
DEPTH = 2


@pytest.fixture(scope="module")
def models() -> tuple[Path, list[Path]]:
    return model("bert", 0, torch.float64), [model("bert", seed, torch.float64) for seed in (1, 2)]


def layer_of(name: str) -> int:
    return int(name.split("layer.")[1].split(".")[0]) if "layer." in name else -1


def effective_rank(matrix: Array) -> float:
    p = np.linalg.svd(matrix, compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def conflict(base: Array, change: Array) -> float:
    left, right = base @ change.T - change @ base.T, base.T @ change - change.T @ base
    return float((np.linalg.norm(left) + np.linalg.norm(right)) / 2 / np.linalg.norm(base) / np.linalg.norm(change))


def larv(base: dict[str, Tensor], tuned: dict[str, Tensor]) -> list[float]:
    """Equations 5 to 8 of the paper with its continuous gate, for one model: a factor for each layer."""
    contrasts, conflicts = [], []
    for layer in range(DEPTH):
        names = [name for name, tensor in base.items() if layer_of(name) == layer and tensor.ndim == 2]
        pairs = [(base[name].numpy(), (tuned[name] - base[name]).numpy()) for name in names]
        contrasts.append(np.mean([effective_rank(b) / effective_rank(t) for b, t in pairs]))
        conflicts.append(np.mean([conflict(b, t) for b, t in pairs]))
    standard = (np.array(conflicts) - np.mean(conflicts)) / np.std(conflicts)
    depth = np.arange(1, DEPTH + 1) / DEPTH
    score = np.array(contrasts) * depth**0.5 / (1 + np.log1p(np.exp(standard)))
    return list(1 + 0.5 * np.tanh(3 * (score - 1)))


def expected(base: dict[str, Tensor], tuned: list[dict[str, Tensor]], factors: list[list[float]]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in base.items():
        layer = layer_of(name)
        shares = [each[layer] if layer >= 0 else 1.0 for each in factors]
        found[name] = tensor + 0.5 * sum(s * (t[name] - tensor) for s, t in zip(shares, tuned, strict=True))
    return found


def require_equal(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def test_larv_scales_each_models_change_in_each_layer(models: tuple[Path, list[Path]]) -> None:
    base, tuned = models
    states, origin = [tensors(folder) for folder in tuned], tensors(base)
    factors = [larv(origin, state) for state in states]
    assert max(map(max, factors)) - min(map(min, factors)) > 0.01
    options: dict[str, Any] = {"method": "task_arithmetic", "base": base, "layer_scale": "larv", "lambda": 0.5}
    require_equal(isomerge.merge(tuned, **options).state_dict(), expected(origin, states, factors))


def test_any_method_takes_the_scaled_changes(models: tuple[Path, list[Path]]) -> None:
    base, tuned = models
    states, origin = [tensors(folder) for folder in tuned], tensors(base)
    moved = [
        {n: origin[n] + (larv(origin, s)[layer_of(n)] if layer_of(n) >= 0 else 1) * (s[n] - origin[n]) for n in origin}
        for s in states
    ]
    found = isomerge.merge(tuned, method="ties", base=base, density=0.3, layer_scale="larv").state_dict()
    require_equal(found, isomerge.merge_state_dicts(moved, method="ties", base=origin, density=0.3))


def test_recipe_and_command_line_say_the_same(models: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, tuned = models
    expected = isomerge.merge(tuned, method="iso_c", base=base, layer_scale="larv").state_dict()
    recipe = {
        "merge_method": "iso_c", "base_model": str(base), "models": [{"model": str(folder)} for folder in tuned],
        "layer_scale": "larv",
    }  # fmt: skip
    require_equal(isomerge.merge_recipe(recipe).state_dict(), expected)
    line = f"merge {tuned[0]} {tuned[1]} --method iso_c --base {base} --layer-scale larv -o {tmp_path / 'out'}"
    assert told(line)[0] == 0
    require_equal(tensors(tmp_path / "out"), expected)
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"


def test_a_gradient_of_lambda_is_lines(models: tuple[Path, list[Path]]) -> None:
    """α + β (ℓ − 1) / (L − 1) in the layers, and α outside them, with α = 1/K and β = 0.4."""
    base, tuned = models
    states, origin = [tensors(folder) for folder in tuned], tensors(base)
    found = isomerge.merge(tuned, method="task_arithmetic", base=base, **{"lambda": [0.5, 0.9]}).state_dict()
    scale = {-1: 0.5, 0: 0.5, 1: 0.9}
    truth = {name: origin[name] + scale[layer_of(name)] * sum(s[name] - origin[name] for s in states) for name in found}
    require_equal(found, truth)


def test_only_what_is_added_to_a_base_can_be_scaled(models: tuple[Path, list[Path]]) -> None:
    base, tuned = models
    with pytest.raises(RequestError, match="'layer_scale' scales what models add to a base, and linear merges models"):
        isomerge.merge(tuned, layer_scale="larv")
    with pytest.raises(RequestError, match="layer_scale"):
        isomerge.merge(tuned, method="ties", base=base, layer_scale="lavr")
