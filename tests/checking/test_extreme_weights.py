"""Weights that are zero, not numbers, tiny or huge: `check` answers all the same, and its numbers are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import isomerge
from models import arrays, model, noisy, tensors, variant

WIDE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
NAME = "model.layers.1.mlp.up_proj.weight"


def llama() -> Path:
    return model("llama", 0, torch.float32, **WIDE)


def scaled(like: Path, factor: float) -> Path:
    return variant(like, {n: t * factor for n, t in tensors(like).items()}, f"times-{factor:g}")


@pytest.mark.parametrize("value", ["zero", "nan", "inf"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_tensor_without_size_is_named_in_either_model(value: str, turned: bool) -> None:
    base = llama()
    number = 0.0 if value == "zero" else float(value)
    other = variant(base, {NAME: torch.full_like(tensors(base)[NAME], number)}, f"all-{value}")
    models = [base, other] if turned else [other, base]
    found = isomerge.check(*models)
    told = " ".join(found["reasons"])
    assert json.dumps(found.to_dict(), allow_nan=False)
    if value == "zero":
        assert f"1 tensors differ much in size; {NAME} is all zero in one of the two" in told
    else:
        assert f"{other} holds NaN or infinite values in '{NAME}'" in told and "differ much in size" not in told
    assert isomerge.check(*models, base=base)["verdict"] == found["verdict"] == "siblings"


@pytest.mark.parametrize("factor", [1e30, 1e-30])
@pytest.mark.parametrize("turned", [False, True])
def test_a_model_of_another_size_altogether_is_measured(factor: float, turned: bool) -> None:
    """The squares of such weights have no room in float32."""
    base = llama()
    models = [base, scaled(base, factor)] if turned else [scaled(base, factor), base]
    found = isomerge.check(*models)
    a, b = (np.concatenate([t.ravel() for t in arrays(folder).values()]) for folder in models)
    x, y = (
        np.concatenate([t.ravel() for n, t in arrays(folder).items() if t.ndim > 1 and ".layers." in n])
        for folder in models
    )
    assert found["distance"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-5)
    assert found["norm_ratio"] == pytest.approx(np.linalg.norm(a) / np.linalg.norm(b), rel=1e-5)
    assert found["cosine"] == pytest.approx(1.0, rel=1e-5) and found["sign_conflict"] == 0
    times = 1 / factor if turned else factor
    assert any(f"is {times:.2g} times as large" in reason for reason in found["reasons"])
    assert json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_siblings_stay_siblings_at_any_size(factor: float) -> None:
    base = llama()
    usual = isomerge.check(base, noisy(base, 0.05))
    found = isomerge.check(scaled(base, factor), scaled(noisy(base, 0.05), factor))
    assert found["verdict"] == usual["verdict"] == "siblings"
    assert found["distance"] == pytest.approx(usual["distance"], rel=1e-4)
    assert found["sign_conflict"] == pytest.approx(usual["sign_conflict"], rel=1e-4)
    rows = zip(found["spaces"], usual["spaces"], strict=True)
    assert all(one["gain"] == pytest.approx(other["gain"], abs=1e-3) for one, other in rows)
