"""SWAD and TWA over stored checkpoints, and the mean prediction of SWAG's draws, against the papers written again."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import ViTForImageClassification

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.errors import IsomergeError, RequestError
from isomerge.merging.data_methods.swad import find_window
from merging.data_methods.swad_by_hand import window_of
from models import model, scratch, tensors
from samples import digits

DATA = {"path": str(digits()), "limit": 60}


@cache
def run() -> list[str]:
    """Checkpoints of a short training on the data, in float64, with gradients of the stock class; oldest first."""
    first = model("vit", 0, torch.float64, num_labels=10)
    module = ViTForImageClassification.from_pretrained(first, dtype=torch.float64)
    step = torch.optim.SGD(module.parameters(), lr=0.15)
    folders = []
    for number in range(6):
        folders.append(str(scratch() / f"run-of-training-{number}"))
        module.save_pretrained(folders[-1])
        for pixels, labels in batches():
            step.zero_grad()
            cross_entropy(module(pixel_values=pixels).logits, labels).backward()
            step.step()
    return folders


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    first = open_checkpoint(model("vit", 0, torch.float64, num_labels=10))
    read = open_data(digits()).passes(first, limit=60, labels=True, batch_size=20)
    return [(batch["pixel_values"].double(), batch["labels"]) for batch in read()]


def loaded(folder: str | Path) -> Any:
    return ViTForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()


def flat(folder: str | Path) -> np.ndarray:
    """All weights in the order of the stock class."""
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in loaded(folder).state_dict().values()])


@cache
def loss_of(folder: str) -> float:
    module = loaded(folder)
    with torch.no_grad():
        losses = [cross_entropy(module(pixel_values=x).logits, y, reduction="sum") for x, y in batches()]
    return float(sum(losses)) / 60


# --- swad -------------------------------------------------------------------------------------------------------------
def test_the_window_is_that_of_the_algorithm() -> None:
    draw = np.random.default_rng(0)
    found = ended = 0
    for _ in range(2000):
        losses = np.abs(np.cumsum(draw.normal(size=draw.integers(1, 20)))).tolist()
        optimum, overfit, tolerance = int(draw.integers(1, 6)), int(draw.integers(1, 6)), float(draw.uniform(1, 2))
        window = find_window(losses, optimum, overfit, tolerance)
        expected = window_of(losses, optimum, overfit, tolerance)
        if expected is None:
            assert (window.start, window.stop, window.found) == (len(losses) - 1, len(losses), False)
            continue
        assert (window.start, window.stop) == expected and window.found
        assert window.ended == (window.stop < len(losses))
        found, ended = found + 1, ended + window.ended
    assert found > ended > 100


def test_swad_is_the_mean_of_the_checkpoints_in_the_window() -> None:
    losses = [loss_of(folder) for folder in run()]
    order = [0, 5, 3, 1, 2, 4]  # a run whose loss falls, and rises again
    folders = [run()[place] for place in order]
    options: dict[str, Any] = {"optimum": 2, "overfit": 2, "tolerance": 1.01}
    start, stop = window_of([losses[k] for k in order], 2, 2, 1.01) or (0, 0)
    assert 0 < start < stop < 6
    merged = isomerge.merge(folders, method="swad", data=DATA, **options)
    expected = [tensors(Path(folder)) for folder in folders[start:stop]]
    for name, tensor in merged.state_dict().items():
        mean = np.mean([own[name].numpy() for own in expected], 0)
        np.testing.assert_allclose(tensor.numpy(), mean, atol=1e-12, err_msg=name)
    record = merged.report().to_dict()
    assert record["chosen"] == folders[start:stop] and record["metric"] == "loss"
    told = [row["score"] for row in record["scores"]]
    np.testing.assert_allclose(told, [losses[k] for k in order], rtol=1e-6)
    assert any(f"checkpoints {start + 1} to {stop} of 6" in note for note in record["notes"])


def test_without_a_minimum_swad_is_the_last_checkpoint() -> None:
    losses = [loss_of(folder) for folder in run()]
    falling = [run()[k] for k in sorted(range(6), key=lambda k: -losses[k])]
    merged = isomerge.merge(falling, method="swad", data=DATA)
    assert merged.report()["chosen"] == [falling[-1]]
    assert any("has no minimum" in note for note in merged.report()["notes"])


def test_swad_refuses_a_window_that_may_miss_its_minimum() -> None:
    with pytest.raises(RequestError, match=r"tolerance \(0\.9\)"):
        isomerge.merge(run()[:2], method="swad", data=DATA, tolerance=0.9).state_dict()


# --- twa --------------------------------------------------------------------------------------------------------------
def by_hand(steps: int, rate: float) -> np.ndarray:
    """W ← W − η P Pᵀ g with P of the QR decomposition of all weights, in float64, with the stock class's gradients."""
    W = np.stack([flat(folder) for folder in run()[:3]], 1)
    P = np.linalg.qr(W)[0]
    module = loaded(run()[0])
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    x, read = W.mean(1), batches() * steps
    length = rate * np.sqrt(np.mean(np.sum((W - x[:, None]) ** 2, 0)))
    squares = 0.0
    for step in range(steps):
        place = torch.tensor(x, requires_grad=True)
        pieces = place.split([shape.numel() for shape in shapes.values()])
        parts = {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        pixels, labels = read[step]
        loss = cross_entropy(functional_call(module, parts, kwargs={"pixel_values": pixels}).logits, labels)
        gradient = P.T @ torch.autograd.grad(loss, place)[0].numpy()
        squares += gradient @ gradient
        x = x - length / np.sqrt(squares) * (P @ gradient)
    return x


def shares_of(record: Any) -> list[float]:
    [row] = record["coefficients"]
    return list(row["models"].values())


def test_twa_descends_in_the_span_of_the_checkpoints(tmp_path: Path) -> None:
    data = {**DATA, "batch_size": 20}
    merged = isomerge.merge(run()[:3], method="twa", data=data, steps=7, rate=0.3)
    merged.save(tmp_path / "out")
    record, found = merged.report().to_dict(), flat(tmp_path / "out")
    W = np.stack([flat(folder) for folder in run()[:3]], 1)
    np.testing.assert_allclose(found, W @ np.array(shares_of(record)), atol=1e-12)
    np.testing.assert_allclose(found, by_hand(7, 0.3), atol=1e-6)
    assert record["objective"]["after"] < record["objective"]["before"] < loss_of(run()[0])
    assert record["objective"]["after"] == pytest.approx(loss_of(str(tmp_path / "out")), rel=1e-5)


def test_checkpoints_that_are_equal_are_no_new_direction(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    loaded(run()[0]).save_pretrained(twin)
    merged = isomerge.merge([run()[0], str(twin), run()[2]], method="twa", data=DATA, steps=3, rate=0.1)
    shares = shares_of(merged.report())
    assert all(map(math.isfinite, shares)) and shares[0] == pytest.approx(shares[1], abs=1e-6)


def test_steps_that_make_it_worse_leave_the_mean() -> None:
    merged = isomerge.merge(run()[:3], method="twa", data=DATA, steps=2, rate=1e4)
    assert shares_of(merged.report()) == pytest.approx([1 / 3] * 3)
    assert any("did not lower the loss" in note for note in merged.report()["notes"])


@pytest.mark.parametrize("method", ["swad", "twa"])
def test_the_outputs_load_in_the_stock_class(method: str, tmp_path: Path) -> None:
    options = {"steps": 2} if method == "twa" else {}
    isomerge.merge(run()[:4], method=method, data=DATA, **options).save(tmp_path / "out")
    assert loaded(tmp_path / "out")(pixel_values=batches()[0][0]).logits.shape == (20, 10)
    with pytest.raises(IsomergeError, match="it has no labels"):
        isomerge.merge(run()[:4], method=method, data=lambda: iter([{"pixel_values": batches()[0][0]}])).state_dict()


# --- swag -------------------------------------------------------------------------------------------------------------
def test_the_mean_prediction_of_draws_is_an_ensemble_of_merges(tmp_path: Path) -> None:
    draws = [isomerge.merge(run(), method="swag", seed=seed) for seed in range(3)]
    found = isomerge.ensemble(draws, DATA)
    for number, draw in enumerate(draws):
        draw.save(tmp_path / str(number))
    modules = [loaded(tmp_path / str(number)) for number in range(3)]
    with torch.no_grad():
        mean = [torch.stack([m(pixel_values=x).logits.softmax(-1) for m in modules]).mean(0) for x, _ in batches()]
    labels = torch.cat([y for _, y in batches()])
    expected = -torch.cat(mean)[torch.arange(60), labels].log().mean()
    assert found.ensemble["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert len({row["loss"] for row in found.models}) == 3


# --- wsm --------------------------------------------------------------------------------------------------------------
def test_rates_in_a_recipe_and_in_a_call_are_the_run_with_a_decay_in_hindsight() -> None:
    rates, W = [3e-4, 2e-4, 5e-5], [tensors(Path(folder)) for folder in run()[:3]]
    entries = [{"model": m, "parameters": {"rate": r}} for m, r in zip(run(), ["3e-4", 2e-4, 5e-5], strict=False)]
    by_recipe = isomerge.merge_recipe({"merge_method": "wsm", "models": entries}).state_dict()
    by_call = isomerge.merge(run()[:3], method="wsm", rate=rates).state_dict()
    for name, tensor in by_call.items():
        assert torch.equal(by_recipe[name], tensor)
        steps = [W[j][name].numpy() - W[j - 1][name].numpy() for j in (1, 2)]
        expected = W[0][name].numpy() + 2 / 3 * steps[0] + 1 / 6 * steps[1]
        np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-12, err_msg=name)
