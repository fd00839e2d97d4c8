"""Adapter soups: similarities computed again from the stock class, and the mean of what PEFT makes of the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import isomerge
from adapters.peft_adapters import load_adapted, save_adapter
from calibration.hooks import Batch, batches, data, stock
from isomerge.errors import RequestError
from models import model


def embeddings(folder: Path, batch: Batch) -> np.ndarray:
    """The last hidden states of the stock class in the mean over the tokens, of length 1."""
    with torch.no_grad():
        hidden = stock(folder)(**batch, output_hidden_states=True).hidden_states[-1].numpy()
    rows = []
    for number, own in enumerate(hidden):
        mask = batch["attention_mask"][number].bool().numpy() if "attention_mask" in batch else slice(None)
        mean = own[mask].mean(0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def mean_cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.mean([[a @ b for b in second] for a in first]))


def soup(models: list[Any], base: Path, data: list[Any], **options: Any) -> Any:
    return isomerge.merge(models, base=base, method="adapter_soup", data=data, **options)


@pytest.mark.parametrize("name", ["llama", "vit", "bert"])
def test_similarities_and_weights_are_those_of_an_independent_computation(name: str) -> None:
    base, *models = [model(name, seed) for seed in range(4)]
    sets = [data(base, seed) for seed in (1, 2, 3, 4)]
    result = soup(models, base, [batches(one, 4, 2) for one in sets], top=2, temperature=0.05)
    seen = [embeddings(base, one) for one in sets]
    similar = [mean_cosine(own, seen[-1]) for own in seen[:-1]]
    report = result.report()
    assert [row["score"] for row in report["scores"]] == pytest.approx(similar, rel=1e-6)
    order = sorted(range(3), key=lambda k: -similar[k])[:2]
    powers = np.exp((np.array([similar[k] for k in order]) - similar[order[0]]) / 0.05)
    weights = dict(zip((str(models[k]) for k in order), powers / powers.sum(), strict=True))
    assert report["chosen"] == list(weights) and report["weights"] == pytest.approx(weights, rel=1e-6)
    found = result.state_dict()
    states = {str(m): dict(isomerge.merge([m]).state_dict()) for m in models}
    for tensor in found:
        expected = sum(weight * states[who][tensor] for who, weight in weights.items())
        torch.testing.assert_close(found[tensor], expected, atol=1e-6, rtol=1e-6)


def test_adapters_are_averaged_as_peft_applies_them(tmp_path: Path) -> None:
    base = model("llama", 0, torch.float32)
    adapters = [
        save_adapter(
            base, tmp_path / f"adapter-{seed}", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]), seed=seed
        )
        for seed in (1, 2, 3)
    ]
    sets = [batches(data(base, seed)) for seed in (1, 2, 3, 2)]
    result = soup([f"{base}+{one}" for one in adapters], base, sets, top=2)
    chosen = [place for place, one in enumerate(adapters) if f"{base}+{one}" in result.report()["chosen"]]
    assert 1 in chosen and len(chosen) == 2  # its data are the task's
    name = "model.layers.0.mlp.up_proj"
    merged: list[Tensor] = []
    for place in chosen:
        adapted = load_adapted(base, adapters[place]).merge_and_unload()
        merged.append(adapted.get_parameter(f"{name}.weight").detach())
    torch.testing.assert_close(result.state_dict()[f"{name}.weight"], (merged[0] + merged[1]) / 2, atol=1e-6, rtol=1e-6)
    result.save(tmp_path / "soup")
    stock(tmp_path / "soup")


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (2, {}, "2 data sets for 2 models. Give one for each in their order, and last that of the task"),
        (3, {"top": 0}, "top is 0"),
        (3, {"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(count: int, options: dict[str, Any], message: str) -> None:
    base, *models = [model("vit", seed) for seed in range(3)]
    with pytest.raises(RequestError, match=message):
        soup(models, base, [batches(data(base, seed)) for seed in range(count)], **options).state_dict()


def test_a_recipe_needs_the_data_of_the_task() -> None:
    recipe = {
        "merge_method": "adapter_soup", "base_model": "a",
        "models": [{"model": "b", "data": "x.csv"}, {"model": "c", "data": "y.csv"}],
    }  # fmt: skip
    with pytest.raises(RequestError, match="the recipe needs 'data', too"):
        isomerge.merge_recipe(recipe)
