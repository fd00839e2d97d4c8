"""Language models that were trained apart, as the experts of one stock mixture."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import isomerge
import models as tiny
from commands import verb
from isomerge.errors import RequestError
from isomerge.merging.mixture import assembly
from isomerge.merging.mixture.evidence import vocabulary_evidence
from isomerge.merging.mixture.router import PULL, fit_posterior
from isomerge.running.passes import DataPass
from precision import float64_throughout

WORDS, LENGTH = 12, 10
Batches = Callable[[], Iterator[dict[str, Tensor]]]
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, transformers.MixtralForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, transformers.MixtralForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM),
}


def text(skill: int, count: int, seed: int) -> Tensor:
    """Every skill has words of its own, and counts through them with a step that the text shows."""
    draw = torch.Generator().manual_seed(seed + 1000 * skill)
    start, step = (torch.randint(1, 5, (count, 1), generator=draw) for _ in range(2))
    return skill * WORDS + (start + step * torch.arange(LENGTH)) % WORDS


def batches(skill: int, count: int = 16) -> Batches:
    rows = text(skill, count, 7)
    return lambda: ({"input_ids": part} for part in rows.split(8))


@functools.cache
def parent(skill: int, family: str = "llama", tied: bool = False) -> Any:
    """In float64, and with gains that are not 1."""
    torch.manual_seed(skill)
    config = CLASSES[family][0](
        vocab_size=3 * WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, intermediate_size=24, max_position_embeddings=LENGTH, tie_word_embeddings=tied, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    model = CLASSES[family][1](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(25):
        ids = text(skill, 32, step)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval().double()


def stock(merged: isomerge.Merged, family: str = "llama") -> Any:
    kind = CLASSES[family][2]
    config = kind.config_class.from_dict(merged.config)
    return kind.from_pretrained(
        None, config=config, state_dict=merged.state_dict(), dtype=torch.float64, experts_implementation="eager"
    ).eval()


def mixed(count: int = 2, family: str = "llama", **options: Any) -> isomerge.Merged:
    parents = [parent(skill, family) for skill in range(count)]
    return isomerge.merge(parents, method="mixture", data=[batches(skill) for skill in range(count)], **options)


@torch.no_grad()
def scores(model: Any, ids: Tensor) -> Tensor:
    with float64_throughout():
        return model(input_ids=ids).logits


def far(model: Any, other: Any, ids: Tensor) -> float:
    wanted = scores(other, ids)
    return float((scores(model, ids) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("count", [2, 3])
def test_on_the_text_of_a_model_the_mixture_computes_what_that_model_computes(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stock(mixed(count))
    for skill in range(count):
        assert far(model, parent(skill), text(skill, 20, 99)) < 1e-2
    monkeypatch.setattr(assembly, "QUIET", 1e-5)  # all that is left is what norms see of the evidence
    quieter = stock(mixed(count))
    for skill in range(count):
        assert far(quieter, parent(skill), text(skill, 20, 99)) < 1e-6


def test_mistral_and_tied_models_are_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "QUIET", 1e-5)
    model = stock(mixed(family="mistral"), "mistral")
    tied = [parent(skill, tied=True) for skill in range(2)]
    untied = stock(isomerge.merge(tied, method="mixture", data=[batches(0), batches(1)]))
    for skill in range(2):
        ids = text(skill, 20, 99)
        assert far(model, parent(skill, "mistral"), ids) < 1e-6 and far(untied, tied[skill], ids) < 1e-6


def test_models_whose_heads_share_norms_come_layer_after_layer_and_are_as_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "QUIET", 1e-5)
    merged = mixed(3, family="qwen3")
    model = stock(merged, "qwen3")
    assert len(model.model.layers) == 3 * 2 + 1
    for skill in range(3):
        assert far(model, parent(skill, "qwen3"), text(skill, 20, 99)) < 1e-6
    merged.save(tmp_path / "out")
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, experts_implementation="eager"
    )
    assert type(saved) is transformers.Qwen3MoeForCausalLM
    assert far(saved, parent(0, "qwen3"), text(0, 20, 99)) < 1e-6


def test_copies_of_a_model_give_its_function_back() -> None:
    both: Batches = lambda: (batch for skill in (0, 1) for batch in batches(skill)())  # noqa: E731
    model = stock(isomerge.merge([parent(0), parent(0)], method="mixture", data=both))
    assert all(far(model, parent(0), text(skill, 20, 99)) < 1e-2 for skill in (0, 1))


def test_every_layer_sends_a_text_to_the_expert_that_knows_it() -> None:
    model = stock(mixed(3))
    assert len(model.model.layers) == len(parent(0).model.layers) + 1
    for skill in range(3):
        sent: list[Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *call, to=sent: to.append(call[-1][2]))
            for layer in model.model.layers
        ]
        scores(model, text(skill, 20, 99))
        for hook in hooks:
            hook.remove()
        assert len(sent) == 3 and all(bool((chosen == skill).all()) for chosen in sent)


def test_nobody_need_say_whose_text_it_is() -> None:
    together: Batches = lambda: (batch for skill in (1, 0) for batch in batches(skill)())  # noqa: E731
    merged = isomerge.merge([parent(0), parent(1)], method="mixture", data=together)
    report = merged.report()
    assert report["goals"] == {"kind": "expert", "examples": pytest.approx([16, 16], abs=0.1)}
    assert all(far(stock(merged), parent(skill), text(skill, 20, 99)) < 1e-2 for skill in range(2))


def test_the_folder_is_a_stock_mixtral_and_its_price_is_told(tmp_path: Path) -> None:
    merged = mixed()
    merged.save(tmp_path / "out")
    assert isomerge.verify(tmp_path / "out").verdict == "good"
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.1.w2.weight" in names
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(model) is transformers.MixtralForCausalLM
    assert torch.allclose(scores(model, text(1, 4, 99)).double(), scores(parent(1), text(1, 4, 99)), atol=0.02)
    report = merged.report()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in model.parameters())
    one = sum(p.numel() for p in parent(0).parameters())
    assert report["parameters"] == {"total": total, "active": total - experts // 2, "one_model": one}
    assert any("million parameters" in note for note in report["notes"])
    assert report["router"]["agreement"] == 1.0


def test_evidence_is_the_mean_likelihood_of_a_token_whatever_the_padding() -> None:
    plain = [parent(0), parent(1)]
    rows = torch.cat([text(0, 6, 3), text(1, 6, 3)])
    seen = vocabulary_evidence(plain, DataPass(lambda: iter([{"input_ids": rows}])))
    filled = torch.cat([rows, torch.full((len(rows), 3), 2)], 1)
    mask = torch.cat([torch.ones_like(rows), torch.zeros(len(rows), 3, dtype=torch.int64)], 1)
    padded = DataPass(lambda: iter([{"input_ids": filled, "attention_mask": mask}]))
    assert torch.allclose(seen, vocabulary_evidence(plain, padded), atol=1e-6)
    word = int(rows[0, 1])
    found = np.stack([
        scipy.special.log_softmax(scores(model, rows).numpy(), -1)[:, :-1][rows[:, 1:].numpy() == word][:, word]
        for model in plain
    ])  # fmt: skip
    wanted = np.clip(found - found.mean(0), -8, 8).mean(1)
    assert np.sign(seen[word].numpy()).tolist() == np.sign(wanted).tolist()
    assert abs(seen[word].numpy() - wanted).max() < abs(wanted).max() / 2  # the guess counts as one more time


def test_the_router_is_the_optimum_that_scipy_finds() -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.2])
    believed = torch.rand(2, 60, generator=draw, dtype=torch.float64)
    believed = believed / believed.sum(0)
    scaled, goal = (inputs / inputs.square().mean(0).sqrt()).numpy(), believed.T.numpy()

    def loss(flat: np.ndarray) -> float:
        weight = flat.reshape(2, 3)
        found = -(goal * scipy.special.log_softmax(scaled @ weight.T, -1)).sum(-1).mean()
        return float(found + PULL * (weight**2).sum())

    best = scipy.optimize.minimize(loss, np.zeros(6), method="BFGS").x.reshape(2, 3)
    found = fit_posterior(inputs, believed) * inputs.square().mean(0).sqrt()
    assert np.allclose(found.numpy(), best, atol=1e-3)


def test_folders_are_mixed_and_without_data_nothing_is(tmp_path: Path) -> None:
    folders = [tiny.model("llama", seed) for seed in (0, 1)]
    rows = [{"input_ids": text(skill, 8, 1) % tiny.VOCABULARY} for skill in (0, 1)]
    by_python = isomerge.merge(folders, method="mixture", data=[(lambda own=own: iter([own])) for own in rows])
    assert by_python.report()["goals"]["kind"] == "own"
    told = verb("merge", *folders, "--method", "mixture", "-o", tmp_path / "out")
    assert told.exit_code == 2 and "data" in told.stderr
    listed = verb("list", "methods", "--json")
    assert "mixture" in listed.stdout and json.loads(listed.stdout)


def test_models_that_cannot_be_experts_are_refused() -> None:
    data: Any = [batches(0), batches(1)]
    for name, words in (
        ("gpt2", "Use models of llama, mistral, qwen3"),
        ("qwen2", "biases of its values"),
    ):
        folders = [tiny.model(name, seed) for seed in (0, 1)]
        with pytest.raises(RequestError, match=words):
            isomerge.merge(folders, method="mixture", data=data)
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.LLAMA, "intermediate_size": 9}))
    with pytest.raises(RequestError, match="gate_proj"):
        isomerge.merge([tiny.model("llama", 0), wide], method="mixture", data=data)
    biased = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.LLAMA, "attention_bias": True}))
    with pytest.raises(RequestError, match="attention_bias"):
        isomerge.merge([biased, biased], method="mixture", data=data)
    with pytest.raises(RequestError, match="is believed on none"):
        isomerge.merge([parent(0), parent(1)], method="mixture", data=batches(0))
    with pytest.raises(RequestError, match="needs data for each model"):
        isomerge.merge([parent(0), parent(1)], method="mixture", data=batches(0), goals="own")
    for options in ({"goals": "mean"}, {"temperature": 0.0}):
        with pytest.raises(RequestError, match=next(iter(options))):
            isomerge.merge([parent(0), parent(1)], method="mixture", data=data, **options)
