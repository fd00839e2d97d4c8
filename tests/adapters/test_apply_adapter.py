"""A base seen through an adapter has the weights that PEFT's own merge gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from adapters.peft_adapters import load_adapted, load_base, logits, merged_by_peft, save_adapter
from isomerge.adapters import apply_adapter
from isomerge.checkpoint import open_checkpoint, write_checkpoint
from models import save_base

CASES = {
    "plain": ("llama", LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "v_proj", "down_proj"])),
    "all linear layers": ("llama", LoraConfig(r=2, target_modules="all-linear")),
    "one layer only": ("llama", LoraConfig(r=2, target_modules=["k_proj"], layers_to_transform=[1])),
    "rank-stabilised": ("llama", LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "up_proj"])),
    "patterns": (
        "llama",
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "k_proj", "o_proj"],
            rank_pattern={"layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.k_proj": 5, r".*1.*o_proj": 1},
            alpha_pattern={"k_proj": 3, "layers.0.self_attn.q_proj": 5},
        ),
    ),
    "embedding and head": ("llama", LoraConfig(r=3, target_modules=["q_proj", "embed_tokens", "lm_head"])),
    "whole modules": (
        "bert",
        LoraConfig(r=3, target_modules=["query"], modules_to_save=["classifier", "pooler.dense"]),
    ),
    "all biases": ("bert", LoraConfig(r=3, target_modules=["query"], bias="all")),
    "biases of the layers": ("bert", LoraConfig(r=3, target_modules=["query", "dense"], bias="lora_only")),
    "bias of the update": ("bert", LoraConfig(r=3, target_modules=["query", "dense"], lora_bias=True)),
    "conv1d": ("gpt2", LoraConfig(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"])),
    "conv1d said so": ("gpt2", LoraConfig(r=3, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, bias="all")),
    "renamed on loading": (
        "vit",
        LoraConfig(r=3, target_modules=["q_proj", "fc1", "fc2"], modules_to_save=["classifier"], bias="lora_only"),
    ),
    "convolution": ("vit", LoraConfig(r=3, target_modules=["patch_embeddings.projection", "v_proj"])),
    "dora": ("llama", LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "down_proj", "embed_tokens"])),
    "dora on conv1d": ("gpt2", LoraConfig(r=3, use_dora=True, target_modules=["c_attn", "c_proj"])),
    "dora on a convolution": ("vit", LoraConfig(r=3, use_dora=True, target_modules=["projection", "q_proj"])),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_pefts_own_merge(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    base = save_base(kind, tmp_path / "base", **({"tie_word_embeddings": False} if kind != "vit" else {}))
    adapter = save_adapter(base, tmp_path / "adapter", config)
    truth = merged_by_peft(base, adapter, tmp_path / "merged")
    original = open_checkpoint(base)

    view = apply_adapter(original, adapter)

    assert dict(view.tensors) == dict(original.tensors) and view.config == original.config
    assert set(truth) == set(view.tensors)
    changed = 0
    for name, expected in truth.items():
        assert torch.allclose(view.read(name).double(), expected.double(), atol=1e-6, rtol=1e-6), name
        changed += not torch.equal(original.read(name), view.read(name))
    assert changed >= len(open_checkpoint(adapter).tensors) // 5
    written = tmp_path / "written"
    write_checkpoint(written, view.tensors, ((n, view.read(n)) for n in view.tensors), donor=view)
    adapted = logits(load_adapted(base, adapter))
    assert torch.allclose(logits(load_base(written)), adapted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["plain", "conv1d", "dora", "dora on conv1d", "convolution", "whole modules"])
def test_rows_are_the_rows_of_the_whole(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    base = save_base(kind, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", config)
    truth = merged_by_peft(base, adapter, tmp_path / "merged") if "dora" not in case else None
    view = apply_adapter(open_checkpoint(base), adapter)
    for name, info in view.tensors.items():
        if len(info.shape) > 1 and info.shape[0] > 3:
            rows = torch.cat([view.read_rows(name, 0, 3).clone(), view.read_rows(name, 3, info.shape[0]).clone()])
            whole = truth[name] if truth and name in truth else view.read(name)
            assert torch.allclose(rows, whole, atol=1e-6), name
        elif len(info.shape) == 1:
            assert torch.equal(view.read_rows(name, 0, 1), view.read(name))


def test_bfloat16_is_computed_in_float32_and_never_rounded(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(base, tmp_path / "adapter", LoraConfig(r=3, target_modules=["q_proj"]))
    view, name = apply_adapter(open_checkpoint(base), adapter), "model.layers.0.self_attn.q_proj.weight"
    stored = open_checkpoint(adapter / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    b, a = (stored.read(key.format(side)).double() for side in "BA")
    exact = open_checkpoint(base).read(name).double() + 8 / 3 * b @ a

    assert view.read(name).dtype == view.read_rows(name, 0, 2).dtype == torch.float32
    assert torch.allclose(view.read(name).double(), exact, atol=1e-6)
    assert not torch.allclose(exact.bfloat16().double(), exact, atol=1e-4)  # rounding would have shown


def test_float64_stays_float64(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", torch.float64)
    adapter = save_adapter(base, tmp_path / "adapter", LoraConfig(r=3, target_modules=["q_proj"]))
    truth = merged_by_peft(base, adapter, tmp_path / "merged", torch.float64)
    view = apply_adapter(open_checkpoint(base), adapter)
    for name, expected in truth.items():
        assert view.read(name).dtype == torch.float64
        assert torch.allclose(view.read(name), expected, atol=1e-13), name


TIED = {
    "embedding": LoraConfig(r=3, target_modules=["embed_tokens", "q_proj"]),
    "head": LoraConfig(r=3, target_modules=["lm_head", "q_proj"]),
    "both": LoraConfig(r=3, target_modules=["lm_head", "embed_tokens"]),
    "embedding whole": LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "head whole": LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "both, kept tied": LoraConfig(r=3, target_modules=["embed_tokens"], ensure_weight_tying=True),
    "both whole, kept tied": LoraConfig(
        r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}


@pytest.mark.parametrize("case", TIED)
def test_a_tied_base_computes_what_the_adapter_was_trained_as(case: str, tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "adapter", TIED[case])
    view = apply_adapter(open_checkpoint(base), adapter)
    tied = "kept tied" in case
    assert ("lm_head.weight" in view.tensors) is not tied
    assert view.config["tie_word_embeddings"] is tied

    write_checkpoint(tmp_path / "out", view.tensors, ((n, view.read(n)) for n in view.tensors), donor=view)

    adapted = logits(load_adapted(base, adapter))
    assert torch.allclose(logits(load_base(tmp_path / "out")), adapted, atol=1e-4, rtol=1e-4)


def test_names_of_the_disk_and_of_the_memory_mean_the_same_layer(tmp_path: Path) -> None:
    """Adapters from before transformers 5 name the layers as they are on disk."""
    base = save_base("vit", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "new", LoraConfig(r=3, target_modules=["q_proj"]))
    new = open_checkpoint(adapter / "adapter_model.safetensors")
    old = {
        key.replace("vit.layers.", "vit.encoder.layer.").replace("attention.q_proj", "attention.attention.query"):
        new.read(key) for key in new.tensors
    }  # fmt: skip
    assert set(old) != set(new.tensors)
    import json

    config = json.loads((adapter / "adapter_config.json").read_text())
    views = [
        apply_adapter(open_checkpoint(base), source)
        for source in (adapter, open_checkpoint(old, config=config, name="old"))
    ]
    name = "vit.encoder.layer.1.attention.attention.query.weight"
    assert torch.equal(views[0].read(name), views[1].read(name))
    assert not torch.equal(views[0].read(name), open_checkpoint(base).read(name))


def test_pickled_adapters_are_read_by_the_restricted_loader(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", LoraConfig(r=3, target_modules=["q_proj"]))
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = apply_adapter(open_checkpoint(base), adapter).read(name)
    stored = open_checkpoint(adapter / "adapter_model.safetensors")
    torch.save({key: stored.read(key) for key in stored.tensors}, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(apply_adapter(open_checkpoint(base), adapter).read(name), expected)
