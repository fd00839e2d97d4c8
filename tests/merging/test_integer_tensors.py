"""A tensor of whole numbers, whatever its name, is no weight: every verb copies it, and none takes it for quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isomerge
from isomerge.adapters.extract import extract
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, RequestError
from models import model, noisy, tensors, variant

TABLE = {"model.routing_table": torch.arange(7)}


def with_table(folder: Path, name: str) -> Path:
    return variant(folder, TABLE, name)


@pytest.fixture(scope="module")
def first() -> Path:
    return with_table(model("llama", 0), "counted")


@pytest.fixture(scope="module")
def second() -> Path:
    return with_table(model("llama", 1), "counted")


def test_aligned_it_is_copied_and_all_else_moves_as_without_it(first: Path, second: Path) -> None:
    found = isomerge.align(second, anchor=first).state_dict()
    plain = isomerge.align(model("llama", 1), anchor=model("llama", 0)).state_dict()
    assert torch.equal(found.pop("model.routing_table"), TABLE["model.routing_table"])
    assert found.keys() == plain.keys() and all(torch.equal(found[n], plain[n]) for n in plain)


@pytest.mark.parametrize("align", [False, True])
def test_merged_it_is_copied_aligned_or_not(first: Path, second: Path, align: bool, tmp_path: Path) -> None:
    isomerge.merge([first, second], align=align).save(tmp_path / "out")
    found = tensors(tmp_path / "out")["model.routing_table"]
    assert found.dtype == torch.int64 and torch.equal(found, TABLE["model.routing_table"])


def test_fused_by_optimal_transport_it_is_the_anchors(first: Path, second: Path) -> None:
    found = isomerge.merge([first, second], method="ot_fusion").state_dict()["model.routing_table"]
    assert found.dtype == torch.int64 and torch.equal(found, TABLE["model.routing_table"])


def test_check_selftest_and_extract_take_it(first: Path, tmp_path: Path) -> None:
    near = with_table(noisy(model("llama", 0), 0.01), "counted")
    assert isomerge.check(first, near)["verdict"] == "siblings"
    assert isomerge.selftest(first)["unchanged"]
    extract(open_checkpoint(first), open_checkpoint(near), rank=2, out=tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_narrower_whole_numbers_may_be_quantised_weights_and_are_refused_everywhere(first: Path) -> None:
    small = variant(model("llama", 2), {"model.routing_table": torch.arange(7, dtype=torch.int32)}, "narrow")
    for work in (lambda: isomerge.merge([first, small]), lambda: isomerge.align(small, anchor=first)):
        with pytest.raises(CheckpointError, match="int32: 'model.routing_table'"):
            work()


def test_a_weight_that_is_whole_in_one_model_only_is_refused_everywhere(first: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = (100 * tensors(model("llama", 1))[name]).round().long()
    odd = variant(model("llama", 1), {name: rounded, **TABLE}, "rounded")
    for models in ([first, odd], [odd, first]):
        with pytest.raises(RequestError, match=f"'{name}' holds whole numbers in '{odd}' and fractions in the others"):
            isomerge.merge(models)
        assert f"{name} holds whole numbers in {odd}" in isomerge.check(*models)["summary"]
        with pytest.raises(RequestError, match="whole numbers in one model and fractions in another"):
            isomerge.merge_state_dicts([tensors(folder) for folder in models])
    with pytest.raises(CheckpointError, match="stored as int64"):
        isomerge.align(odd, anchor=first)
