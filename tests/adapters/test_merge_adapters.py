"""Merged adapters, loaded by PEFT, have the update that merging the inputs' updates directly gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor

from adapters.peft_adapters import load_adapted, merged_by_peft, save_adapter
from isomerge.adapters import apply_adapter
from isomerge.adapters.adapter import open_adapter
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.adapters import merge_adapters
from isomerge.merging.methods import METHODS
from isomerge.merging.methods.method import REQUIRED
from models import save_base

# Without an option that has to be given, and without files of statistics, which adapters do not bring.
RUNS_ALONE = [
    name
    for name, method in METHODS.items()
    if all(option.default is not REQUIRED and option.kind is not str for option in method.options)
]


def updates(base: Path, adapter: Path) -> dict[str, Tensor]:
    """PEFT's own ΔW of every layer, in float64."""
    model = load_adapted(base, adapter, torch.float64)
    found = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert found
    return found


def everywhere(parts: list[dict[str, Tensor]], combine: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """The rule applied to every layer, an adapter that has it not counting as zero."""
    like = {name: part[name] for part in parts for name in part}
    return {name: combine([part.get(name, torch.zeros_like(like[name])) for part in parts]) for name in like}


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    lost = sum(float((found[name] - truth[name]).square().sum()) for name in truth)
    return math.sqrt(lost / sum(float(tensor.square().sum()) for tensor in truth.values()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Adapters that differ in rank, scale, kind of scale and targets."""
    tmp_path = tmp_path_factory.mktemp("llama")
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=False)
    configs = [
        LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj", "embed_tokens"]),
        LoraConfig(r=2, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 4}),
        LoraConfig(r=1, target_modules=["q_proj", "embed_tokens"], layers_to_transform=None),
    ]
    return base, [save_adapter(base, tmp_path / f"a{i}", c, seed=i) for i, c in enumerate(configs)]


def mean_of(weights: list[float]) -> Callable[[list[Tensor]], Tensor]:
    return lambda parts: sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)  # type: ignore


def elected(parts: list[Tensor]) -> Tensor:
    """TIES without trimming: each element's sign by its sum, then the mean of those that have it."""
    stacked = torch.stack(parts)
    agree = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
    return (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)


def test_a_linear_merge_of_full_rank_is_exact(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    options = {"weight": [0.5, 1.5, 1.0]}
    record = merge_adapters(adapters, out=tmp_path / "out", options=options, rank=16)
    truth = everywhere([updates(base, adapter) for adapter in adapters], mean_of([0.5, 1.5, 1.0]))
    found = updates(base, tmp_path / "out")
    assert set(found) == set(truth)
    assert distance(found, truth) < 2e-7 and record["relative_error"] < 1e-7
    ranks = {row["name"]: row["rank"] for row in record["targets"]}
    assert ranks["model.layers.0.self_attn.q_proj"] == 3 + 2 + 1  # and no more: the sum of ranks needs no padding
    assert ranks["model.layers.0.self_attn.k_proj"] == 4 and ranks["model.layers.1.mlp.down_proj"] == 3


def test_the_reported_error_is_the_measured_one(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    record = merge_adapters(adapters, out=tmp_path / "out")
    truth = everywhere([updates(base, adapter) for adapter in adapters], mean_of([1, 1, 1]))
    found = updates(base, tmp_path / "out")
    assert 0.01 < record["relative_error"] == pytest.approx(distance(found, truth), rel=1e-5)
    for row in record["targets"]:
        name = row["name"]
        assert row["error"] == pytest.approx(distance({name: found[name]}, {name: truth[name]}), rel=1e-4, abs=1e-6)
        best = torch.linalg.svdvals(truth[name])
        optimum = float(best[row["rank"] :].square().sum().sqrt() / best.square().sum().sqrt())
        assert row["error"] == pytest.approx(optimum, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "options", "rule"),
    [
        ("ties", {}, elected),
        ("task_arithmetic", {"weight": [1.0, 2.0, 3.0], "lambda": 0.5}, lambda p: p[0] / 2 + p[1] + 1.5 * p[2]),
        ("linear", {"weight": [1.0, 2.0, -0.5], "normalize": False}, lambda p: p[0] + 2 * p[1] - 0.5 * p[2]),
    ],
)
def test_methods_act_on_the_updates(
    method: str, options: dict[str, Any], rule: Any, llama: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    base, adapters = llama
    truth = everywhere([updates(base, adapter) for adapter in adapters], rule)
    record = merge_adapters(adapters, out=tmp_path / "out", method=method, options=options, rank=64)
    assert distance(updates(base, tmp_path / "out"), truth) < 2e-6 and record["relative_error"] < 2e-6
    cut = merge_adapters(adapters, out=tmp_path / "cut", method=method, options=options, rank=2)
    assert cut["relative_error"] == pytest.approx(distance(updates(base, tmp_path / "cut"), truth), rel=1e-4)


@pytest.mark.parametrize("name", RUNS_ALONE)
def test_every_method_takes_adapters_with_different_targets(
    name: str, llama: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    _, adapters = llama
    method = METHODS[name]
    if method.most is not None:
        adapters = adapters[: method.most + (method.base == "required")]
    record = merge_adapters(adapters, out=tmp_path / "out", method=name, rank=64)
    stored = open_checkpoint(tmp_path / "out" / "adapter_model.safetensors")
    assert record["relative_error"] < 1e-5 and all(stored.read(key).isfinite().all() for key in stored.tensors)


def test_slerp_goes_from_the_first_adapter_to_the_second(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    name = "model.layers.0.self_attn.q_proj"
    one, two = (updates(base, adapter)[name] for adapter in adapters[:2])
    angle = torch.acos((one * two).sum() / one.norm() / two.norm())
    truth = (torch.sin(0.7 * angle) * one + torch.sin(0.3 * angle) * two) / torch.sin(angle)
    merge_adapters(adapters[:2], out=tmp_path / "out", method="slerp", options={"t": 0.3}, rank=16)
    assert torch.allclose(updates(base, tmp_path / "out")[name], truth, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_conv1d_and_convolutions_and_renamed_layers(kind: str, tmp_path: Path) -> None:
    base = save_base(kind, tmp_path / "base")
    names = {"gpt2": ["c_attn", "c_proj"], "vit": ["q_proj", "patch_embeddings.projection"]}[kind]
    adapters = [
        save_adapter(base, tmp_path / f"a{i}", LoraConfig(r=i + 1, target_modules=names), seed=i) for i in range(2)
    ]
    merge_adapters(adapters, out=tmp_path / "out", rank=3)
    truth = everywhere([updates(base, adapter) for adapter in adapters], mean_of([1, 1]))
    assert distance(updates(base, tmp_path / "out"), truth) < 1e-6


def test_whole_modules_and_biases_are_merged_too(tmp_path: Path) -> None:
    base = save_base("bert", tmp_path / "base")
    adapters = [
        save_adapter(
            base,
            tmp_path / f"a{i}",
            LoraConfig(
                r=2,
                target_modules=["query", "key"][i:],
                modules_to_save=["classifier"],
                bias="lora_only",
                lora_bias=True,
            ),
            seed=i,
        )
        for i in range(2)
    ]
    with pytest.raises(RequestError, match=r"query\.bias' is stored whole, and merging it needs the base's"):
        merge_adapters(adapters, out=tmp_path / "out", rank=4)
    merge_adapters(adapters, out=tmp_path / "out", rank=4, base=open_checkpoint(base))
    merged = [merged_by_peft(base, adapter, tmp_path / f"m{i}") for i, adapter in enumerate(adapters)]
    found = merged_by_peft(base, tmp_path / "out", tmp_path / "merged")
    for name in found:
        assert torch.allclose(found[name], (merged[0][name] + merged[1][name]) / 2, atol=1e-5), name


def test_two_names_of_one_layer_are_one_when_the_base_is_known(tmp_path: Path) -> None:
    base = save_base("vit", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "new", LoraConfig(r=2, target_modules=["q_proj"]))
    new = open_checkpoint(adapter / "adapter_model.safetensors")
    old = {
        key.replace("vit.layers.", "vit.encoder.layer.").replace("attention.q_proj", "attention.attention.query"):
        new.read(key) for key in new.tensors
    }  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["query"]}
    named = open_checkpoint(old, config=config, name="old")
    record = merge_adapters([adapter, named], out=tmp_path / "out", base=open_checkpoint(base))
    assert len(record["targets"]) == 2 and record["relative_error"] < 1e-6
    truth = updates(base, adapter)
    assert distance(updates(base, tmp_path / "out"), truth) < 1e-6  # the mean of an adapter and itself


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_tied_embedding_stays_tied(method: str, tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    adapters = [save_adapter(base, tmp_path / f"a{i}", config, seed=i) for i in range(2)]
    merge_adapters(adapters, out=tmp_path / "out", method=method, rank=16)
    rule = {"linear": mean_of([1, 1]), "ties": elected}[method]
    truth = everywhere([updates(base, adapter) for adapter in adapters], rule)
    found = updates(base, tmp_path / "out")
    assert "lm_head" in found and torch.allclose(found["lm_head"], found["model.embed_tokens"], atol=1e-12)
    assert distance(found, truth) < 1e-6
    assert "lm_head.weight" not in apply_adapter(open_checkpoint(base), tmp_path / "out").tensors


def test_different_bases_are_noted(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    _, adapters = llama
    other = save_base("llama", tmp_path / "elsewhere", tie_word_embeddings=False)
    stranger = save_adapter(other, tmp_path / "b", LoraConfig(r=1, target_modules=["q_proj"]))
    record = merge_adapters([*adapters, stranger], out=tmp_path / "out")
    assert any("different bases" in note and "elsewhere" in note for note in record["notes"])


def test_the_same_inputs_give_the_same_bytes(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    _, adapters = llama
    hashes = {merge_adapters(adapters, out=tmp_path / f"o{i}", method="ties")["sha256"] for i in range(2)}
    assert len(hashes) == 1


def test_bad_requests_are_refused_before_anything_is_written(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    gpt2 = save_base("llama", tmp_path / "wide", tie_word_embeddings=False, head_dim=8)
    wide = save_adapter(gpt2, tmp_path / "w", LoraConfig(r=1, target_modules=["q_proj"]))
    out = tmp_path / "out"
    for arguments, message in [
        ({"method": "linaer"}, "Did you mean 'linear'"),
        ({"rank": 0}, "rank cannot be 0"),
        ({"adapters": [adapters[0], wide]}, r"is \(32, 16\) in .*w and \(16, 16\) in another"),
        ({"options": {"wieght": 1.0}}, "Did you mean 'weight'"),
        ({"method": "slerp"}, "slerp takes 1 to 1 adapters beside the first, and 3 are named"),
    ]:
        given = {"adapters": adapters, **arguments}
        with pytest.raises(RequestError, match=message):
            merge_adapters(out=out, **given)
        assert not out.exists()
    with pytest.raises(RequestError, match="inputs are never modified"):
        merge_adapters(adapters, out=adapters[0])


def in_weights(base: Path, adapter: Path, folder: Path) -> dict[str, Tensor]:
    """What PEFT's own merge changes in every tensor of the base, computed in float64."""
    after = merged_by_peft(base, adapter, folder, torch.float64)
    before = load_file(base / "model.safetensors")
    return {name: after[name].double() - tensor.double() for name, tensor in before.items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "vit"])
def test_dora_adapters_are_merged_by_what_they_add_to_their_base(kind: str, tmp_path: Path) -> None:
    targets = {"llama": ["q_proj", "embed_tokens"], "gpt2": ["c_attn"], "vit": ["projection", "q_proj"]}[kind]
    base = save_base(kind, tmp_path / "base", tie_word_embeddings=False)
    configs = [
        LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=targets),
        LoraConfig(r=2, use_rslora=True, target_modules=targets),  # a plain one beside it
        LoraConfig(r=1, use_dora=True, target_modules=targets[:1]),
    ]
    adapters = [save_adapter(base, tmp_path / f"a{i}", config, seed=i) for i, config in enumerate(configs)]
    parts = [in_weights(base, adapter, tmp_path / f"m{i}") for i, adapter in enumerate(adapters)]
    truth = everywhere(parts, mean_of([0.5, 1.5, 1.0]))
    options = {"weight": [0.5, 1.5, 1.0]}
    record = merge_adapters(adapters, out=tmp_path / "out", options=options, base=open_checkpoint(base), rank=200)
    assert distance(in_weights(base, tmp_path / "out", tmp_path / "m"), truth) < 1e-6
    assert record["relative_error"] < 1e-6 and any("DoRA" in note for note in record["notes"])
    assert not open_adapter(tmp_path / "out").config["use_dora"]
    # At the largest rank of the inputs, the reported loss is the measured one.
    cut = merge_adapters(adapters, out=tmp_path / "cut", options=options, base=open_checkpoint(base))
    lost = distance(in_weights(base, tmp_path / "cut", tmp_path / "c"), truth)
    assert 0.01 < cut["relative_error"] == pytest.approx(lost, rel=1e-4)


def test_dora_adapters_need_their_base(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    dora = save_adapter(base, tmp_path / "dora", LoraConfig(r=1, use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(RequestError, match=r"depends on the base's weights, so name the base") as refused:
        merge_adapters([adapters[0], dora], out=tmp_path / "out")
    assert refused.value.keys == ("base",)
    assert not (tmp_path / "out").exists()


def core_space(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Core Space as in its paper: bases from the stacked factors, TIES on the cores, in float64."""
    left = torch.linalg.svd(torch.cat([b for b, _ in factors], 1), full_matrices=False)[0]
    right = torch.linalg.svd(torch.cat([a for _, a in factors]), full_matrices=False)[2]
    return left @ elected([left.T @ b @ a @ right.T for b, a in factors]) @ right


def knots(parts: list[Tensor]) -> Tensor:
    u, s, v = torch.linalg.svd(torch.cat(parts, 1), full_matrices=False)
    kept = s > 1e-6 * s[0]
    return u[:, kept] @ elected(list((s[kept, None] * v[kept]).chunk(len(parts), 1)))


def test_core_space_merges_adapters_by_their_own_factors(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    record = merge_adapters(adapters, out=tmp_path / "out", method="core_space", rank=64)
    name = "model.layers.0.self_attn.q_proj"
    opened = [open_adapter(adapter) for adapter in adapters]
    factors = [one.factors(one.targets[name]) for one in opened]
    scaled = [(b.double() * one.targets[name].scale, a.double()) for (b, a), one in zip(factors, opened, strict=True)]
    torch.testing.assert_close(updates(base, tmp_path / "out")[name], core_space(scaled), rtol=1e-4, atol=1e-5)
    assert record["relative_error"] < 1e-5
    assert {row["name"]: row["rank"] for row in record["targets"]}[name] <= 3 + 2 + 1


def test_knots_merges_adapters_in_their_shared_outputs(llama: tuple[Path, list[Path]], tmp_path: Path) -> None:
    base, adapters = llama
    merge_adapters(adapters, out=tmp_path / "out", method="knots", rank=64)
    name = "model.layers.1.self_attn.q_proj"
    truth = knots([updates(base, adapter)[name] for adapter in adapters])
    torch.testing.assert_close(updates(base, tmp_path / "out")[name], truth, rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="must be one of task_arithmetic, ties"):
        merge_adapters(adapters, out=tmp_path / "no", method="knots", options={"inner": "knots"})
