"""What was only put into another order is put back, and what was doubled is halved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import models as tiny
from merging.transport.model_pairs import FAMILIES, batches, carried, fuse, largest_difference, model, permuted

POLICIES = ("joint", "averaging", "weighted", "weighted_units", "first")
MORE = ["t5", "mixtral", "deberta", "neox", "qwen3", "olmo2", "gemma2", "opt", "distilbert"]


@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_permuted_model_is_put_back_to_the_last_bit(family: str, cost: str) -> None:
    anchor = model(family)
    source = permuted(anchor)
    assert largest_difference(tiny.tensors(source), tiny.tensors(anchor)) > 0.1
    data = batches(anchor) if cost == "activations" else None
    for residual in POLICIES if family == "vit" else ("joint", "averaging"):
        found = carried(source, anchor, data, cost=cost, residual=residual)
        assert largest_difference(found.state_dict(), tiny.tensors(anchor)) < 1e-12
        report = found.report()
        assert report["sources"][0]["distance"]["before"] > 0.5 > 1e-9 > report["sources"][0]["distance"]["after"]
        if residual in ("joint", "first"):
            assert report["exact"]
            assert largest_difference(found.state_dict(), tiny.tensors(anchor)) == 0


@pytest.mark.parametrize("family", MORE)
def test_every_family_is_put_back(family: str) -> None:
    anchor = tiny.model(family)
    found = carried(permuted(anchor), anchor)
    assert largest_difference(found.state_dict(), tiny.tensors(anchor)) == 0


@pytest.mark.parametrize("cost", ["weights", "activations"])
def test_a_table_narrower_than_the_stream_is_put_back_with_it(cost: str) -> None:
    anchor = tiny.model("opt", do_layer_norm_before=False, word_embed_proj_dim=8, tie_word_embeddings=True)
    found = carried(permuted(anchor), anchor, batches(anchor), cost=cost)
    assert largest_difference(found.state_dict(), tiny.tensors(anchor)) == 0


def test_only_the_stream_is_put_back_where_only_it_was_moved() -> None:
    anchor = model("bert")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    changed = {}
    for name, tensor in tiny.tensors(anchor).items():
        written = "embeddings" in name or name.endswith("output.dense.weight") or "LayerNorm" in name
        written = written or name.endswith("output.dense.bias")
        read = any(part in name for part in ("query.w", "key.w", "value.w", "intermediate.dense.w", "classifier.w"))
        axis = (1 if tensor.ndim == 2 and "embeddings" in name else 0) if written else 1
        changed[name] = tensor.index_select(axis, order) if written or read else tensor
    source = tiny.variant(anchor, changed, "other-stream")
    assert tiny.difference(tiny.logits(anchor), tiny.logits(source)) < 1e-12
    for data in (None, batches(anchor)):
        for residual in ("joint", "averaging"):
            found = carried(source, anchor, data, only="residual", residual=residual)
            assert largest_difference(found.state_dict(), tiny.tensors(anchor)) < 1e-14


@pytest.mark.parametrize("cost", ["weights", "activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hard_plans_leave_the_function_of_another_model_unchanged(family: str, cost: str) -> None:
    anchor, source = model(family), model(family, seed=1)
    data = batches(anchor) if cost == "activations" else None
    more = [{"only": "attention"}, {"heads": "fixed"}, {"residual": "identity"}] if family == "bert" else []
    for options in ({}, {"only": "ffn"}, *more):
        found = carried(source, anchor, data, cost=cost, **options)
        assert found.report()["exact"]
        assert tiny.difference(tiny.logits(source), tiny.logits(anchor, found.state_dict())) < 1e-12
        assert largest_difference(found.state_dict(), tiny.tensors(source)) > 0


def test_the_same_models_fuse_to_themselves() -> None:
    anchor = model("vit")
    found = fuse([anchor, permuted(anchor), permuted(anchor, 4)], weights=[1, 2, 3])
    assert largest_difference(found.state_dict(), tiny.tensors(anchor)) < 1e-14


def doubled(folder: Path) -> Path:
    """Every unit of stream and feed-forward twice: both read the same, and each acts half as strongly."""
    found: dict[str, Tensor] = {}
    for name, tensor in tiny.tensors(folder).items():
        if "norm" in name or "embed_tokens" in name:
            tensor = tensor.repeat_interleave(2, -1)
        elif "o_proj" in name or "down_proj" in name:
            tensor = tensor.repeat_interleave(2, 0)
        else:
            tensor = tensor.repeat_interleave(2, 1) / 2
        if "gate_proj" in name or "up_proj" in name:
            tensor = tensor.repeat_interleave(2, 0)
        if "down_proj" in name:
            tensor = tensor.repeat_interleave(2, 1) / 2
        found[name] = tensor
    sizes = {"hidden_size": 24, "intermediate_size": 14}
    return tiny.variant(folder, found, "doubled", **sizes)


@pytest.mark.parametrize("cost", ["weights", "activations"])
def test_equal_units_become_one_and_one_becomes_two_without_changing_the_function(cost: str) -> None:
    narrow = model("llama")
    wide = doubled(narrow)
    assert tiny.difference(tiny.logits(narrow), tiny.logits(wide)) < 1e-12
    data = batches(narrow) if cost == "activations" else None
    found = carried(wide, narrow, data, cost=cost)
    assert not found.report()["exact"]  # it cannot be known that nothing was lost
    assert largest_difference(found.state_dict(), tiny.tensors(narrow)) < 1e-12
    back = carried(narrow, wide, data, cost=cost)
    assert tiny.difference(tiny.logits(narrow), tiny.logits(wide, back.state_dict())) < 1e-12


def test_bfloat16_models_are_put_back_to_the_last_bit() -> None:
    anchor = tiny.model("vit", dtype=torch.bfloat16)
    found = carried(permuted(anchor), anchor).state_dict()
    truth = tiny.tensors(anchor)
    assert all(tiny.same_bytes(found[name], truth[name]) for name in truth)
