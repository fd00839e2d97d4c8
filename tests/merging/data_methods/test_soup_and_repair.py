"""Greedy soups against trying by hand, and renormalised units against the parents' own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import isomerge
from calibration.hooks import batches, data, stock
from isomerge.calibration import calibrate
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.merging.data_methods.greedy_soup import choose_soup
from isomerge.merging.layerwise.goals import Beliefs
from isomerge.merging.repair import repair
from models import mean, model, read_config, tensors


def test_a_greedy_soup_is_what_trying_one_after_the_other_gives() -> None:
    numbers = np.random.default_rng(0)
    states = [{"w": torch.tensor(numbers.standard_normal(4))} for _ in range(6)]
    target = numbers.standard_normal(4)

    def score(state: dict) -> float:
        return -float(np.linalg.norm(state["w"].numpy() - target))

    soup = choose_soup(states, score)
    order = sorted(range(6), key=lambda k: -score(states[k]))
    chosen, best = [order[0]], score(states[order[0]])
    for k in order[1:]:
        average = {"w": torch.stack([states[j]["w"] for j in [*chosen, k]]).mean(0)}
        if score(average) >= best:
            chosen, best = [*chosen, k], score(average)
    assert soup.chosen == chosen and 1 < len(chosen) < 6
    assert soup.score == pytest.approx(best)
    torch.testing.assert_close(soup.state["w"], torch.stack([states[k]["w"] for k in chosen]).mean(0))
    assert soup.own == [score(s) for s in states] and [t[0] for t in soup.tried] == order


@pytest.mark.parametrize(("fall", "stay"), [(1e-8, [0, 1, 2]), (1e-4, [0])])
def test_rounding_leaves_no_model_out(fall: float, stay: list[int]) -> None:
    """The mean of equal models differs from them in the last bits, and so does its score."""
    scores = iter([97.0, 97.0, 97.0, 97.0 * (1 - fall), 97.0 * (1 - 2 * fall)])
    assert choose_soup([{"w": torch.ones(2)}] * 3, lambda state: next(scores)).chosen == stay


def test_a_perfect_score_is_not_beaten_by_another() -> None:
    assert choose_soup([{"w": torch.ones(2)}] * 2, lambda state: math.inf).chosen == [0, 1]


def test_a_strict_soup_takes_only_what_improves_it() -> None:
    """DiWA's rule. Equal scores leave a model out, and so does a rise in the last bits."""
    models = [{"w": torch.tensor([x])} for x in (1.0, 1.0, 3.0, 5.0)]

    def score(state: dict) -> float:
        return -abs(float(state["w"]) - 2.0)

    # 1, then 1 (equal: out), then 3 with 1 is 2 (better: in), then 5 makes it 3 (worse: out)
    assert choose_soup(models, score, strict=True).chosen == [0, 2]
    assert choose_soup(models, score).chosen == [0, 1, 2]
    scores = iter([1.0, 1.0, 1.0 + 1e-8])
    assert choose_soup(models[:2], lambda state: next(scores), strict=True).chosen == [0]


def test_a_strict_soup_has_no_tolerance() -> None:
    folders = [model("vit", 0), model("vit", 1)]
    given = batches(data(folders[0], labels=True))
    with pytest.raises(RequestError, match="Use one of them"):
        isomerge.merge(folders, method="greedy_soup", data=given, strict=True, tolerance=0.1).state_dict()


def test_soups_of_nothing_and_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(RequestError, match="there is no model"):
        choose_soup([], lambda state: 0.0)
    with pytest.raises(RequestError, match="model 1 is not a number"):
        choose_soup([{"w": torch.zeros(1)}], lambda state: math.nan)


def units(folder_or_state, config_of, batch, layer: str) -> tuple[np.ndarray, np.ndarray]:
    module = stock(config_of)
    if not hasattr(folder_or_state, "exists"):
        module = (
            type(module)
            .from_pretrained(None, config=module.config, state_dict=dict(folder_or_state), dtype=torch.float64)
            .eval()
        )
    seen = []
    handle = module.get_submodule(layer).register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    with torch.no_grad():
        module(**batch)
    handle.remove()
    values = seen[0].reshape(-1, seen[0].shape[-1])
    if "attention_mask" in batch:
        values = values[batch["attention_mask"].reshape(-1).bool()]
    return values.mean(0).numpy(), values.std(0, correction=0).numpy()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("bert", ["bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.1.intermediate.dense"]),
        ("gpt2", ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"]),
    ],
)
def test_repaired_units_have_the_mean_and_spread_of_their_parents(name: str, layers: list[str]) -> None:
    folders = [model(name, 0), model(name, 1)]
    batch = data(folders[0])
    average = mean(tensors(folders[0]), tensors(folders[1]), 0.25)
    merged = MemoryCheckpoint("the mean", average, read_config(folders[0]))
    fixed = repair(merged, folders, batches(batch, 4, 2), weight=[3, 1])
    assert set(fixed) == set(average)
    changed = {n for n in fixed if not torch.equal(fixed[n], average[n])}
    assert changed == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    for layer in layers:
        parents = [units(f, f, batch, layer) for f in folders]
        wanted = [0.75 * parents[0][k] + 0.25 * parents[1][k] for k in (0, 1)]
        got = units(fixed, folders[0], batch, layer)
        np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)
        np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
        assert np.abs(units(average, folders[0], batch, layer)[1] - wanted[1]).max() > 1e-2


def test_without_a_bias_only_the_spread_is_repaired() -> None:
    folders = [model("llama", 0), model("llama", 1)]
    batch, layer = data(folders[0]), "model.layers.1.mlp.up_proj"
    average = mean(tensors(folders[0]), tensors(folders[1]))
    merged = MemoryCheckpoint("the mean", average, read_config(folders[0]))
    parents = [calibrate(f, batches(batch), what={"units"}) for f in folders]
    fixed = repair(merged, parents, batches(batch), only=r"1\.mlp\.up_proj")
    wanted = sum(units(f, f, batch, layer)[1] for f in folders) / 2
    np.testing.assert_allclose(units(fixed, folders[0], batch, layer)[1], wanted, atol=1e-5)
    ratio = fixed[layer + ".weight"] / average[layer + ".weight"]
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))


def test_a_repair_that_means_nothing_is_refused() -> None:
    folder = model("bert")
    with pytest.raises(RequestError, match="no layer is chosen"):
        repair(folder, [folder], batches(data(folder)), only="nothing")
    with pytest.raises(RequestError, match="do not fit 1 parents"):
        repair(folder, [folder], batches(data(folder)), weight=[1, 2])


def seen(folder, batch: dict[str, torch.Tensor], layer: str) -> np.ndarray:
    """(examples, positions, units) of a stock model in float64."""
    module, found = stock(folder), []
    handle = module.get_submodule(layer).register_forward_hook(lambda m, args, out: found.append(out.detach()))
    with torch.no_grad():
        module(**batch)
    handle.remove()
    return found[0].numpy()


def test_units_are_repaired_towards_whoever_is_believed() -> None:
    """Each parent's rows count as far as it is believed; padding counts nowhere."""
    folders, layer = [model("bert", 0), model("bert", 1)], "bert.encoder.layer.0.intermediate.dense"
    batch = data(folders[0])
    count = len(batch["input_ids"])
    shares = torch.rand(2, count, generator=torch.Generator().manual_seed(3))
    shares[:, 0] = torch.tensor([1.0, 0.0])
    shares = shares / shares.sum(0)
    merged = MemoryCheckpoint("the mean", mean(tensors(folders[0]), tensors(folders[1])), read_config(folders[0]))
    parts = list(shares.split(2, 1))
    fixed = repair(merged, folders, batches(batch, 2, 2, 2), believed=Beliefs(parts))
    mask = batch["attention_mask"].bool().numpy()
    rows = [seen(folder, batch, layer)[mask] for folder in folders]
    each = [np.broadcast_to(own[:, None], mask.shape)[mask].astype(np.float64) for own in shares.numpy()]
    wanted = sum((w[:, None] * y).sum(0) for w, y in zip(each, rows, strict=True)) / mask.sum()
    squares = sum((w[:, None] * y**2).sum(0) for w, y in zip(each, rows, strict=True)) / mask.sum()
    got = units(fixed, folders[0], batch, layer)
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)
    np.testing.assert_allclose(got[1], np.sqrt(squares - wanted**2), atol=1e-5)
