"""A module in memory has the names and values that save_pretrained writes, and takes them back."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from isomerge.checkpoint import load_into_module, open_checkpoint
from isomerge.errors import CheckpointError

transformers = pytest.importorskip("transformers")


def vit():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))


def gpt2():
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, **ids)
    return transformers.GPT2LMHeadModel(config)


def bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=16, max_position_embeddings=8, **sizes))


def mixtral():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.MixtralConfig(vocab_size=16, num_key_value_heads=1, num_local_experts=3, **sizes)
    return transformers.MixtralForCausalLM(config)


MODELS = [vit, gpt2, bert, mixtral]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("reloaded", [False, True], ids=["fresh", "reloaded"])
def test_names_and_values_are_those_that_save_pretrained_writes(build, reloaded, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    if reloaded:  # from_pretrained remembers the conversions it used, which is another path through transformers
        model = type(model).from_pretrained(tmp_path)
    disk, memory = open_checkpoint(tmp_path), open_checkpoint(model)
    assert dict(memory.tensors) == dict(disk.tensors)
    assert all(torch.equal(memory.read(name), disk.read(name)) for name in disk.tensors)
    assert memory.config["architectures"] == disk.config["architectures"] == [type(model).__name__]
    assert memory.config["model_type"] == disk.config["model_type"]


@pytest.mark.parametrize("build", [vit, gpt2])
def test_a_transformers_without_the_mapping_is_read_through_what_it_saves(build, monkeypatch):
    model = build()
    expected = open_checkpoint(model)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    got = open_checkpoint(model)
    assert dict(got.tensors) == dict(expected.tensors)
    assert all(torch.equal(got.read(name), expected.read(name)) for name in expected.tensors)


def test_the_names_differ_from_those_in_memory_where_transformers_renames():
    assert "vit.encoder.layer.0.attention.attention.query.weight" in open_checkpoint(vit()).tensors
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in open_checkpoint(mixtral()).tensors
    assert "lm_head.weight" not in open_checkpoint(gpt2()).tensors


@pytest.mark.parametrize("build", MODELS)
def test_opening_leaves_the_model_alone(build):
    model = build()
    before = copy.deepcopy(model.state_dict())
    checkpoint = open_checkpoint(model)
    for name in checkpoint.tensors:
        checkpoint.read(name).zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("build", MODELS)
def test_checkpoint_tensors_load_back_into_the_module(build):
    source, target = build(), build()
    checkpoint = open_checkpoint(source)
    parameters = list(target.parameters())
    load_into_module(target, {name: checkpoint.read(name) for name in checkpoint.tensors})
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))


def test_ties_and_dtype_survive_loading():
    target = gpt2().to(torch.bfloat16)
    checkpoint = open_checkpoint(gpt2())
    load_into_module(target, {name: checkpoint.read(name) for name in checkpoint.tensors})
    assert target.lm_head.weight is target.transformer.wte.weight
    assert target.dtype == torch.bfloat16
    assert torch.equal(target.lm_head.weight, checkpoint.read("transformer.wte.weight").to(torch.bfloat16))


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda t: t.pop("classifier.bias"), "no tensor for 'classifier.bias'"),
        (lambda t: t.update(stranger=torch.zeros(1)), "no place for 'stranger'"),
        (lambda t: t.update({"classifier.bias": torch.zeros(7)}), "another shape for 'classifier.bias'"),
    ],
)
def test_a_wrong_set_of_tensors_is_refused_and_changes_nothing(spoil, cause):
    target = vit()
    before = copy.deepcopy(target.state_dict())
    checkpoint = open_checkpoint(vit())
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    spoil(tensors)
    with pytest.raises(CheckpointError, match=cause):
        load_into_module(target, tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_plain_modules_go_by_their_state_dict():
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    checkpoint = open_checkpoint(source)
    assert list(checkpoint.tensors) == ["bias", "weight"] and checkpoint.config == {}
    load_into_module(target, {name: checkpoint.read(name) for name in checkpoint.tensors})
    assert torch.equal(source.weight, target.weight)
    with pytest.raises(CheckpointError, match=r"2 problems.*no tensor for 'bias'.*no place for 'extra'"):
        load_into_module(target, {"weight": source.weight, "extra": source.bias})
    with pytest.raises(CheckpointError, match=r"'bias' is \(2,\) where the module has \(3,\)"):
        load_into_module(target, {"weight": source.weight, "bias": torch.zeros(2)})


def test_an_offloaded_model_is_refused():
    with pytest.raises(CheckpointError, match="device 'meta'"):
        open_checkpoint(gpt2().to("meta"))


def test_loading_leaves_the_progress_bars_as_they_were():
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    checkpoint = open_checkpoint(gpt2())
    load_into_module(gpt2(), {name: checkpoint.read(name) for name in checkpoint.tensors})
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, bars)
