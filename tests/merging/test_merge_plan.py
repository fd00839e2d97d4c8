"""`isomerge plan`: what a merge would do, from headers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from commands import said, verb
from isomerge import system
from isomerge.checkpoint.files import SafetensorsFile
from isomerge.errors import RequestError
from isomerge.merging.api import explain_tensor, plan
from isomerge.merging.recipe import load_recipe
from models import model, variant

A, B = model("llama", 0, torch.bfloat16), model("llama", 1, torch.bfloat16)
RECIPE = f"""
merge_method: slerp
base_model: {A}
slices:
- sources:
  - {{model: {A}, layer_range: [0, 2]}}
  - {{model: {B}, layer_range: [0, 2]}}
- sources:
  - {{model: {A}, layer_range: [1, 2]}}
  - {{model: {B}, layer_range: [1, 2]}}
parameters:
  t:
  - {{filter: mlp, value: [0, 1]}}
  - value: 0.5
"""


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsFile, "read", refuse)
    monkeypatch.setattr(SafetensorsFile, "read_rows", refuse)


@pytest.mark.usefixtures("headers_only")
def test_the_plan_is_what_the_merge_then_does(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(load_recipe(RECIPE))
    monkeypatch.undo()
    merged = isomerge.merge_recipe(RECIPE)
    assert planned["tensors"] == len(merged.plan) == 3 * 9 + 3
    assert planned["bytes_written"] == sum(info.nbytes for info in merged.plan.values())
    assert planned["bytes_read"] == sum(
        info.nbytes for path in (A, B) for info in isomerge.open_checkpoint(path).tensors.values()
    )
    assert planned["config_changes"]["num_hidden_layers"] == 3
    assert planned["seconds"] > 0 and planned["peak_memory_bytes"] > 0


@pytest.mark.usefixtures("headers_only")
def test_a_tensor_is_explained_with_the_line_its_value_comes_from() -> None:
    found = explain_tensor(load_recipe(RECIPE), "model.layers.2.mlp.up_proj.weight")
    assert found["inputs"] == [{"model": str(B), "tensor": "model.layers.1.mlp.up_proj.weight"}]
    assert found["options"]["t"]["value"] == 1  # a slice of one layer is the end of its gradient
    assert "line 13" in found["options"]["t"]["origin"] and "filter mlp" in found["options"]["t"]["origin"]
    with pytest.raises(RequestError, match=r"Did you mean 'model\.layers\.2\.mlp\.up_proj\.weight'"):
        explain_tensor(load_recipe(RECIPE), "model.layers.2.mlp.upproj.weight")


@pytest.mark.usefixtures("headers_only")
def test_all_problems_are_told_at_once() -> None:
    wrong = {"model.norm.weight": torch.ones(5), "lm_head.weight": torch.ones(29, 5)}
    other = variant(B, wrong, "wrong", drop=("model.layers.0.mlp.up_proj.weight",))
    recipe = f"merge_method: linear\nmodels:\n- model: {A}\n- model: {other}\n"
    with pytest.raises(RequestError) as told:
        plan(load_recipe(recipe))
    for words in ("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        assert words in str(told.value)


def test_memory_that_is_not_enough_is_told_with_how_much_is() -> None:
    with pytest.raises(RequestError, match=r"Allow at least [\d,]+ MB"):
        plan(load_recipe(RECIPE), max_memory="50MB")


def test_the_verb_prints_one_object_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text(RECIPE)

    assert said("plan", tmp_path / "r.yml")["tensors"] == 30
    explained = verb("plan", tmp_path / "r.yml", "--explain", "model.norm.weight").stdout
    assert "slerp" in explained and "line" in explained and "0.5" in explained


def test_the_time_is_made_of_what_was_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nanosecond for each byte that is hashed or copied, and for each value a method combines; on two processors."""
    from isomerge.merging.outcome import estimate

    monkeypatch.setattr(estimate, "_fastest", lambda work: estimate.TRIAL_BYTES * 1e-9)
    monkeypatch.setattr(estimate, "_timed", lambda job, group: estimate.TRIAL_ELEMENTS * 1e-9)
    monkeypatch.setattr(system, "processors", lambda: 2)
    found = plan(f"merge_method: linear\nmodels:\n- model: {A}\n- model: {B}\n")
    values = found["bytes_written"] / 2  # bfloat16
    assert found["bytes_read"] == 2 * found["bytes_written"]
    expected = (found["bytes_read"] + 2 * found["bytes_written"] + values) * 1e-9 / 2
    assert found["seconds"] == pytest.approx(expected) and found["threads"] == 3


def test_a_method_that_reads_twice_is_charged_for_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from isomerge.merging.outcome import estimate

    asked: list[int] = []
    monkeypatch.setattr(estimate._Read, "rows", lambda self, start, stop: (asked.append(1), self.tensor[start:stop])[1])
    counts = []
    for method in ("linear", "karcher"):
        asked.clear()
        plan(f"merge_method: {method}\nmodels:\n- model: {A}\n- model: {B}\n")
        counts.append(len(asked))
    assert counts[1] == 2 * counts[0]
