"""What was asked for and could not be done is an error, or the first thing the result says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import isomerge
from isomerge.errors import RequestError
from models import model, read_config, same_bytes, stock, tensors


def test_state_dicts_without_a_config_are_not_aligned_in_silence() -> None:
    a, b = (tensors(model("llama", seed)) for seed in (0, 1))
    for call in (
        lambda: isomerge.align(b, anchor=a),
        lambda: isomerge.merge([a, b], align=True),
        lambda: isomerge.align_family([a, b]),
    ):
        with pytest.raises(RequestError, match=r"config=") as caught:
            call()
        assert "config" in caught.value.keys


def test_names_and_shapes_do_not_say_what_a_model_computes() -> None:
    """Why a config is asked for: where pairs are rotated and gains are stored otherwise, symmetries are others."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 4, "intermediate_size": 12, "vocab_size": 29, "tie_word_embeddings": False}  # fmt: skip
    llama, *others = (stock(f"{name}ForCausalLM", **sizes).eval() for name in ("Llama", "Ernie4_5", "Gemma"))
    ids = torch.arange(2, 10)[None]
    for other in others:
        shapes, own = ({k: v.shape for k, v in one.state_dict().items()} for one in (llama, other))
        assert shapes == own
        other.load_state_dict(llama.state_dict())
        with torch.no_grad():
            assert (llama(ids).logits - other(ids).logits).abs().max() > 1e-3


def test_with_their_config_they_are_aligned_as_their_folders_are() -> None:
    folders = [model("llama", seed) for seed in (0, 1)]
    a, b = (isomerge.open_checkpoint(tensors(f), config=read_config(f)) for f in folders)
    found, expected = isomerge.align(b, a).state_dict(), isomerge.align(folders[1], folders[0]).state_dict()
    assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())


def test_a_config_given_beside_state_dicts_says_what_they_cannot() -> None:
    folders = [model("llama", seed) for seed in (0, 1)]
    (a, b), config = map(tensors, folders), read_config(folders[0])
    expected = isomerge.align(folders[1], folders[0]).state_dict()
    for found in (
        isomerge.align(b, a, config=config),
        isomerge.align(b, folders[0], config=config),
        isomerge.align_family([b], anchor=a, config=config).members[0],
    ):
        assert all(same_bytes(found.state_dict()[name], tensor) for name, tensor in expected.items())
    merged = isomerge.merge([a, b], align=True, config=config).state_dict()
    truth = isomerge.merge(folders, align=True).state_dict()
    assert merged.keys() == truth.keys() and all(same_bytes(merged[name], truth[name]) for name in truth)


def test_a_state_dict_beside_a_model_of_its_names_and_shapes_is_of_its_kind() -> None:
    folders = [model("llama", seed) for seed in (0, 1)]
    a, b = map(tensors, folders)
    expected = isomerge.align(folders[1], folders[0]).state_dict()
    for found in (
        isomerge.align(b, anchor=folders[0]),
        isomerge.align(folders[1], anchor=a),
        isomerge.align_family([b, folders[0]], anchor=a).members[0],
    ):
        assert all(same_bytes(found.state_dict()[name], tensor) for name, tensor in expected.items())
    truth = isomerge.merge(folders, align=True).state_dict()
    for models in ([a, folders[1]], [folders[0], b]):
        merged = isomerge.merge(models, align=True).state_dict()
        assert merged.keys() == truth.keys() and all(same_bytes(merged[name], truth[name]) for name in truth)


def test_a_state_dict_beside_a_model_of_other_shapes_asks_for_its_config() -> None:
    a = {name: tensor for name, tensor in tensors(model("llama", 0)).items() if "layers.1" not in name}
    with pytest.raises(RequestError, match="state_dict in memory has no config.json.*config=") as caught:
        isomerge.align(a, anchor=model("llama", 1))
    assert caught.value.keys == ("config",)


def test_a_selftest_of_a_state_dict_asks_for_its_config() -> None:
    folder = model("llama", 0)
    with pytest.raises(RequestError, match="Testing the symmetries.*config=") as caught:
        isomerge.selftest(tensors(folder))
    assert caught.value.keys == ("config",)
    found, truth = isomerge.selftest(tensors(folder), config=read_config(folder)), isomerge.selftest(folder)
    assert found.unchanged and found.scrambled_distance == truth.scrambled_distance


@pytest.mark.parametrize("call", [isomerge.align_family, isomerge.merge])
def test_a_config_that_no_model_needs_is_refused(call: Any) -> None:
    with pytest.raises(RequestError, match="none of them is one") as caught:
        call([model("vit", 0), model("vit", 1)], config={"model_type": "vit"})
    assert caught.value.keys == ("config",)


def test_a_merge_whose_models_cannot_be_aligned_says_so_first(tmp_path: Path) -> None:
    config = {"model_type": "nobody-knows", "architectures": ["NobodyModel"]}
    models = [isomerge.open_checkpoint({"w": torch.randn(4, 4)}, config=config) for _ in range(2)]
    assert isomerge.merge(models, align=True).notes[0].startswith("NOT ALIGNED")
    assert isomerge.align(models[0], models[1]).verdict.startswith("unmoved")


@pytest.mark.parametrize(
    "useless",
    [
        {"sweeps": 3},
        {"solver": "sinkhorn"},
        {"evidence": "mix"},
        {"limit": 4},
        {"measure": "l2"},
        {"site": "pre"},
        {"device": "cuda"},
    ],
)
def test_what_a_stored_transform_has_no_use_for_is_refused(useless: dict[str, Any], tmp_path: Path) -> None:
    isomerge.align(model("vit", 1), model("vit", 0)).save_transform(tmp_path / "t.safetensors")
    with pytest.raises(RequestError, match="nothing is solved"):
        isomerge.align(model("vit", 1), transform=tmp_path / "t.safetensors", **useless)


def test_data_that_would_not_be_looked_at_is_refused() -> None:
    with pytest.raises(RequestError, match="data has no use"):
        isomerge.align(model("vit", 1), model("vit", 0), data=[{}], evidence="weights")


def test_a_base_that_would_not_be_used_is_refused() -> None:
    a, b = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    with pytest.raises(RequestError, match="no use for a base"):
        isomerge.merge_state_dicts([a, b], method="linear", base=a)
