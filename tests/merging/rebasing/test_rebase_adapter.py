"""A moved adapter, read by PEFT on the new base, is the old one on the old base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import isomerge
import models as tiny
from isomerge.errors import RequestError
from merging.rebasing.fine_tunes import disguised
from models import model
from precision import float64_throughout

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj", "gate_proj"],
    "vit": ["q_proj", "v_proj", "fc1", "fc2"],
    "bert": ["query", "output.dense"],
    "gpt2": ["c_attn", "c_fc"],
}


def stock(folder: Path) -> Any:
    kind = getattr(transformers, tiny.read_config(folder)["architectures"][0])
    return kind.from_pretrained(folder, dtype=torch.float64).eval()


def adapter(base: Path, folder: Path, targets: list[str], **settings: Any) -> Path:
    """One with random factors, and random numbers in what it trains beside them."""
    torch.manual_seed(3)
    made = peft.get_peft_model(
        stock(base), peft.LoraConfig(target_modules=targets, **{"r": 3, "lora_alpha": 5, **settings})
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder


@torch.no_grad()
def answers(folder: Path, beside: Path | None = None) -> Tensor:
    made = stock(folder)
    if beside is not None:
        made = peft.PeftModel.from_pretrained(made, beside).double().eval()
    with float64_throughout():
        return made(**tiny.inputs(stock(folder).config, torch.float64)).logits


def apart(wanted: Tensor, got: Tensor, plain: Tensor) -> float:
    """As a share of what the adapter changes."""
    return float((wanted - got).norm() / (wanted - plain).norm())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        (
            "llama",
            {"use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 9}},
        ),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("vit", {}),
        ("vit", {"bias": "lora_only"}),
        ("vit", {"modules_to_save": ["classifier"]}),
        ("bert", {"bias": "all"}),
        ("gpt2", {"fan_in_fan_out": True}),
    ],
)
def test_on_a_base_in_disguise_peft_gives_the_same_answers(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    base = model(kind, 0)
    onto = disguised(base)
    old = adapter(base, tmp_path / "old", TARGETS[kind], **settings)
    found = isomerge.rebase_adapter(old, base, onto, tmp_path / "new")
    wanted, plain = answers(base, old), answers(base)
    assert apart(wanted, answers(onto, tmp_path / "new"), plain) <= 1e-5
    assert apart(wanted, answers(onto, old), plain) > 0.05, "the old factors belong to the old base"
    assert found.relative_error <= 1e-6 and not found.left_out
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(onto) and config["r"] == 3
    if "rank_pattern" in settings:
        assert list(config["rank_pattern"].values()) == [2], "each layer keeps its rank"
    assert any("nothing was measured" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["llama", "vit", "bert"])
def test_factors_stored_in_float64_stay_exact(tmp_path: Path, kind: str) -> None:
    base = model(kind, 0)
    onto = disguised(base)
    old = adapter(base, tmp_path / "old", TARGETS[kind])
    file = old / "adapter_model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    isomerge.rebase_adapter(old, base, onto, tmp_path / "new")
    assert load_file(tmp_path / "new" / file.name).popitem()[1].dtype == torch.float64
    wanted = _through_peft(base, old)
    assert apart(wanted, _through_peft(onto, tmp_path / "new"), answers(base)) <= 1e-10


@torch.no_grad()
def _through_peft(folder: Path, beside: Path) -> Tensor:
    """PEFT makes its factors in float32 and copies into them, so they are put back by hand."""
    made = peft.PeftModel.from_pretrained(stock(folder), beside).double().eval()
    stored = load_file(beside / "adapter_model.safetensors")
    known = dict(made.named_parameters())
    for name, tensor in stored.items():
        target = next(
            (k for k in (name, name.replace(".weight", ".default.weight"), name.replace(".bias", ".default.bias"))
             if k in known), None
        )  # fmt: skip
        assert target is not None, name
        known[target].copy_(tensor)
    with float64_throughout():
        return made(**tiny.inputs(stock(folder).config, torch.float64)).logits


def test_on_a_sibling_the_updates_are_the_same(tmp_path: Path) -> None:
    base = model("llama", 0, torch.float32, **tiny.WIDE["llama"])
    onto = tiny.noisy(base, 0.01)
    old = adapter(base, tmp_path / "old", TARGETS["llama"])
    isomerge.rebase_adapter(old, base, onto, tmp_path / "new", scale=0.5)
    before, after = (_updates(folder) for folder in (old, tmp_path / "new"))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.allclose(after[name], 0.5 * before[name], rtol=0, atol=1e-6 * float(before[name].abs().max())), (
            name
        )


def _updates(folder: Path) -> dict[str, Tensor]:
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in stored if name.endswith(".lora_A.weight")]
    scale = config["lora_alpha"] / config["r"]
    return {n: scale * stored[f"{n}.lora_B.weight"].double() @ stored[f"{n}.lora_A.weight"].double() for n in names}


def test_what_cannot_be_an_adapter_of_the_new_base_is_refused(tmp_path: Path) -> None:
    base = model("llama", 0)
    dora = adapter(base, tmp_path / "dora", TARGETS["llama"], use_dora=True)
    with pytest.raises(RequestError, match="DoRA adapter, whose update has no low rank"):
        isomerge.rebase_adapter(dora, base, model("llama", 1), tmp_path / "out")
    plain = adapter(base, tmp_path / "plain", TARGETS["llama"])
    with pytest.raises(RequestError, match="of another shape"):
        isomerge.rebase_adapter(plain, base, model("llama", 1, intermediate_size=9), tmp_path / "out")
    with pytest.raises(RequestError, match="adapter and not a model.*rebase_adapter"):
        isomerge.rebase(plain, base, model("llama", 1))
    with pytest.raises(isomerge.IsomergeError, match="adapter_config.json"):
        isomerge.rebase_adapter(model("llama", 2), base, model("llama", 1), tmp_path / "out")
    with pytest.raises(isomerge.IsomergeError):
        isomerge.rebase_adapter(plain, model("vit", 0), model("vit", 1), tmp_path / "out")
    with pytest.raises(RequestError, match="folder of the input"):
        isomerge.rebase_adapter(plain, base, model("llama", 1), plain)
    tied = model("llama", 0, tie_word_embeddings=True)
    head = adapter(tied, tmp_path / "head", ["embed_tokens"])
    with pytest.raises(RequestError, match="one of two tables"):
        isomerge.rebase_adapter(head, tied, disguised(tied), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trained_norms_have_no_low_rank_where_the_stream_rotates_and_a_note_says_so(tmp_path: Path) -> None:
    base = model("llama", 0)
    onto = disguised(base)
    old = adapter(base, tmp_path / "old", TARGETS["llama"], modules_to_save=["input_layernorm"])
    found = isomerge.rebase_adapter(old, base, onto, tmp_path / "new")
    assert found.relative_error > 1e-3 and any("trained norms are folded" in note for note in found.notes)
    merged = isomerge.rebase(f"{base}+{old}", base, onto)  # the way out, which is exact
    got = tiny.logits(onto, {name: tensor.double() for name, tensor in merged.tensors()})
    assert apart(answers(base, old), got, answers(base)) <= 1e-5


def test_a_base_with_an_adapter_is_carried_as_a_model(tmp_path: Path) -> None:
    base = model("llama", 0)
    onto = disguised(base)
    old = adapter(base, tmp_path / "old", TARGETS["llama"])
    merged = isomerge.rebase(f"{base}+{old}", base, onto)
    got = tiny.logits(onto, {name: tensor.double() for name, tensor in merged.tensors()})
    assert apart(answers(base, old), got, answers(base)) <= 1e-5
