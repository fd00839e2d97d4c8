"""What the calibration data may and may not change, and what is said when it is not good enough."""

from __future__ import annotations

import copy

import pytest
import torch

import models as tiny
from isomerge.errors import IsomergeError, RequestError
from merging.layerwise.reconstructions import again, data, load, reconstruct
from models import mostly_slow


def pair(name: str):
    return [tiny.model(name, seed) for seed in range(2)]


def padded(batch: dict[str, torch.Tensor], value: int = 0) -> dict[str, torch.Tensor]:
    """The batch with three more positions that count for nothing, filled with some token."""
    found = {}
    for name, tensor in batch.items():
        width = (tensor.shape[0], 3)
        extra = torch.zeros(width, dtype=tensor.dtype) if "mask" in name else torch.full(width, value)
        found[name] = torch.cat([tensor, extra.to(tensor.dtype)], 1)
    return found


@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2", "mixtral", "deberta", "t5"], "gpt2"))
def test_padding_has_no_influence(name: str) -> None:
    folders = pair(name)
    batches = data(folders[0], 2)
    if name == "t5":  # encoder and decoder of one length: their masks must not be mixed up
        for batch in batches:
            batch["decoder_input_ids"] = batch["input_ids"].roll(1, 0)
            batch["decoder_attention_mask"] = batch["attention_mask"].roll(1, 0)
    expected = reconstruct(folders, again(batches), align=False).state_dict()
    got = reconstruct(folders, again([padded(b, 5) for b in batches]), align=False).state_dict()
    for tensor in expected:
        torch.testing.assert_close(got[tensor], expected[tensor], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(["vit", "t5", "deberta", "mixtral"], "vit"))
def test_the_cache_changes_nothing(name: str) -> None:
    folders = pair(name)
    batches = data(folders[0], 3)
    expected = reconstruct(folders, again(batches), align=False, cache=0).state_dict()
    for cache in ("60KB", "1GB"):  # room for some of the batches, for all of them
        got = reconstruct(folders, again(batches), align=False, cache=cache).state_dict()
        for tensor in expected:
            torch.testing.assert_close(got[tensor], expected[tensor], rtol=0, atol=1e-12)


def test_labels_are_not_used_and_limit_counts_examples() -> None:
    folders = pair("vit")
    batches = data(folders[0], 2, size=8)
    labelled = [{**batch, "labels": torch.full((24,), 3)} for batch in batches]
    assert reconstruct(folders, {"path": again(labelled), "limit": 30}, align=False).report()["examples"] == 30
    first, second = (reconstruct(folders, again(b), align=False).state_dict() for b in (batches, labelled))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_too_few_samples_are_told_with_numbers() -> None:
    folders = pair("vit")
    report = reconstruct(folders, again(data(folders[0], 1, size=2)), align=False).report()
    assert report["examples"] == 6
    assert any("classifier.weight: 6 samples for 13 inputs; 52 or more" in w for w in report["notes"])


def test_an_expert_with_few_tokens_keeps_the_average() -> None:
    folders = pair("mixtral")
    merged = reconstruct(folders, again(data(folders[0], 1, size=6)), align=False)
    first, second = (tiny.tensors(folder) for folder in folders)
    name = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight"
    for tensor in (name.format(part, 1) for part in range(3)):
        torch.testing.assert_close(merged.state_dict()[tensor], (first[tensor] + second[tensor]) / 2)
    assert any("experts 0 (" in w and "each needs 120 tokens" in w for w in merged.report()["notes"])


def test_values_that_are_not_finite_name_the_layer_and_the_model() -> None:
    first, second = (load(folder, dtype=torch.float32) for folder in pair("vit"))
    with torch.no_grad():
        second.vit.layers[1].mlp.fc1.bias[2] = 1e38
        second.vit.layers[1].mlp.fc2.weight[:, 2] = 1e38
    batches = [{"pixel_values": b["pixel_values"].float()} for b in data(pair("vit")[0], 1)]
    with pytest.raises(
        IsomergeError, match=r"vit.encoder.layer.1.intermediate.dense.weight: the ViTForImage.* not finite"
    ):
        reconstruct([first, second], again(batches), align=False)


@pytest.mark.parametrize("features", ["mean", "joint"])
def test_numbers_that_a_norm_would_turn_to_zeros_are_found(features: str) -> None:
    """Squares of 3e38 overflow, the norm divides by infinity, and all that follows is finite."""
    first, second = (load(folder, dtype=torch.float32) for folder in pair("llama"))
    with torch.no_grad():
        second.model.embed_tokens.weight[:, 1] = 3e38
    with pytest.raises(IsomergeError, match=r"o_proj.weight: the LlamaForCausalLM.* too large to be squared"):
        reconstruct([first, second], again(data(pair("llama")[0], 1)), align=False, features=features)


@pytest.mark.parametrize("align", [True, False])
def test_weights_that_are_not_finite_are_named(align: bool) -> None:
    first, second = (load(folder) for folder in pair("vit"))
    with torch.no_grad():
        second.vit.layers[1].mlp.fc1.weight[2, 2] = float("nan")
    with pytest.raises(IsomergeError, match=r"vit.encoder.layer.1.intermediate.dense.weight"):
        reconstruct([first, second], again(data(pair("vit")[0], 1)), align=align)


def test_data_that_changes_between_passes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isomerge.data.base.KEPT", 0)  # what fits in memory is read once and cannot change
    folders = pair("vit")
    passes = []

    def fewer_each_time():
        passes.append(None)
        return iter(data(folders[0], 4 - len(passes), size=2))

    with pytest.raises(RequestError, match="the same batches in the same order"):
        reconstruct(folders, fewer_each_time, align=False, cache="0")


def test_all_that_is_wrong_with_a_request_is_said_at_once() -> None:
    folders, batches = pair("vit"), again(data(pair("vit")[0], 1))
    with pytest.raises(RequestError) as caught:
        reconstruct(folders, {"path": batches, "limit": 0}, ridge=-1, refine=1.5)
    for part in ("'ridge' must not be negative", "'refine' must be a whole number", "limit"):
        assert part in str(caught.value)
    with pytest.raises(RequestError, match="1 values for 2 models"):
        reconstruct(folders, batches, weights=[1])
    with pytest.raises(RequestError, match="Did you mean 'regmean\\+\\+'"):
        reconstruct(folders, batches, method="regmeen++")
    with pytest.raises(RequestError, match="not one batch"):
        reconstruct(folders, again([]), align=False)
    with pytest.raises(RequestError, match="classifier"):
        reconstruct([folders[0], tiny.model("vit", 1, num_labels=7)], batches, align=False)


def test_the_models_given_are_not_changed() -> None:
    modules = [load(folder) for folder in pair("vit")]
    before = copy.deepcopy([m.state_dict() for m in modules])
    reconstruct(modules, again(data(pair("vit")[0], 1)), align=False)
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
