"""Every family: the result loads in its stock class and is nearer to the mean of the parents than the average is."""

from __future__ import annotations

import pytest
import torch

import models as tiny
from isomerge import architectures
from isomerge.architectures import inferred
from isomerge.architectures.inferring import sandbox
from merging.layerwise.reconstructions import again, data, distance, features, load, reconstruct
from models import mostly_slow


@pytest.mark.parametrize("name", mostly_slow(tiny.MODELS, "vit", "llama"))
def test_the_result_is_nearer_to_the_mean_of_the_parents_than_the_average(name: str) -> None:
    first, second = tiny.model(name, 0), tiny.model(name, 1)
    calibration, unseen = again(data(first)), data(first, 2, seed=9)
    goal = (features(load(first), unseen) + features(load(second), unseen)) / 2

    average = reconstruct([first, second], again(data(first, 1, size=2)), ridge=1e12)
    solved = reconstruct([first, second], calibration)

    models = [load(first, merged.state_dict(), **merged.config_changes) for merged in (average, solved)]
    errors = [distance(goal, features(model, unseen)) for model in models]
    assert errors[1] < 0.95 * errors[0]
    # `logits` loads by from_pretrained and fails on any missing, unexpected or reshaped key.
    assert tiny.logits(first, solved.state_dict(), **solved.config_changes).isfinite().all()
    assert solved.state_dict().keys() >= tiny.tensors(first).keys()
    for layer in solved.report()["layers"]:
        assert layer["residual_after"] <= layer["residual_before"] * (1 + 1e-9), layer


@pytest.mark.parametrize("name", mostly_slow(tiny.MODELS, "vit", "llama"))
def test_a_model_merged_with_itself_is_itself(name: str) -> None:
    model = tiny.model(name, 0)
    merged = reconstruct([model, model], again(data(model, 1))).state_dict()
    for tensor, expected in tiny.tensors(model).items():
        torch.testing.assert_close(merged[tensor], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(["vit", "gpt2", "bert", "mixtral"], "gpt2"))
def test_a_huge_ridge_is_the_weighted_average(name: str) -> None:
    models = [tiny.model(name, seed) for seed in range(3)]
    weights = [0.5, 0.2, 0.3]
    merged = reconstruct(models, again(data(models[0], 1)), weights=[5, 2, 3], align=False, ridge=1e15).state_dict()
    parents = [tiny.tensors(m) for m in models]
    for tensor in parents[0]:
        expected = sum(w * p[tensor] for w, p in zip(weights, parents, strict=True))
        torch.testing.assert_close(merged[tensor], expected, rtol=0, atol=1e-10)


def test_a_weight_of_one_gives_that_model_back() -> None:
    models = [tiny.model("vit", seed) for seed in range(2)]
    merged = reconstruct(models, again(data(models[0], 1)), weights=[0, 1], align=False).state_dict()
    for tensor, expected in tiny.tensors(models[1]).items():
        torch.testing.assert_close(merged[tensor], expected, rtol=0, atol=1e-9)


def test_three_models_are_merged_nearer_to_their_mean() -> None:
    models = [tiny.model("vit", seed) for seed in range(3)]
    unseen = data(models[0], 2, seed=9)
    goal = sum(features(load(m), unseen) for m in models) / 3
    errors = []
    for ridge in (1e12, 1e-2):
        merged = reconstruct(models, again(data(models[0], 2)), ridge=ridge)
        errors.append(distance(goal, features(load(models[0], merged.state_dict()), unseen)))
    assert errors[1] < 0.8 * errors[0]


def test_half_precision_models_are_solved_in_float32_and_saved_as_they_came(tmp_path) -> None:
    models = [tiny.model("llama", seed, dtype=torch.bfloat16) for seed in range(2)]
    merged, wide = (reconstruct(models, again(data(models[0], 2)), dtype=dtype) for dtype in (None, "float32"))
    assert any(not torch.equal(t, t.bfloat16().float()) for t in wide.state_dict().values())
    merged.save(tmp_path / "out")
    saved = tiny.tensors(tmp_path / "out")
    assert {n: t.dtype for n, t in saved.items()} == {n: t.dtype for n, t in tiny.tensors(models[0]).items()}
    assert tiny.same_bytes(saved["model.norm.weight"], merged.state_dict()["model.norm.weight"])
    assert tiny.logits(tmp_path / "out").isfinite().all()
    assert tiny.read_config(tmp_path / "out")["architectures"] == tiny.read_config(models[0])["architectures"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PhiForCausalLM", "FalconForCausalLM"])
def test_an_architecture_without_a_specification_is_solved_too(kind: str, monkeypatch) -> None:
    """Here attention and feed-forward stand side by side; the second multiplies by its weights without `linear`."""
    config = {**tiny.TEXT, "intermediate_size": 24, "partial_rotary_factor": 0.5}
    config |= {"alibi": False, "bias": False} if kind.startswith("Falcon") else {}
    monkeypatch.setitem(tiny.MODELS, kind, (kind, config))
    monkeypatch.setattr(architectures, "FAMILIES", {})  # no file, and no tiny model to infer anything from
    monkeypatch.setattr(inferred, "PROVEN", {})
    for module in (inferred, sandbox):
        monkeypatch.setattr(module, "LARGEST", 10)
    first, second = tiny.model(kind, 0), tiny.model(kind, 1)
    unseen = data(first, 1, seed=9)
    goal = (features(load(first), unseen) + features(load(second), unseen)) / 2
    average = reconstruct([first, second], again(data(first, 1, size=2)), align=False, ridge=1e12)
    solved = reconstruct([first, second], again(data(first)), align=False)
    errors = [distance(goal, features(load(first, m.state_dict()), unseen)) for m in (average, solved)]
    assert errors[1] < 0.8 * errors[0]
    report = solved.report()
    assert any("no specification says who writes" in note for note in report["notes"])
    assert any("tied to the input table" in note for note in report["notes"]) == kind.startswith("Falcon")
    assert sum(layer["kind"] == "sum" and len(layer["layers"]) == 2 for layer in report["layers"]) == 2
