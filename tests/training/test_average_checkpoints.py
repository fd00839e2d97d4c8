"""The Trainer callback, in a real Trainer: its averages against the checkpoints that the Trainer wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from isomerge.errors import RequestError
from isomerge.training import AverageCheckpoints
from training.runs import train

SAVES = {"save_strategy": "steps", "save_steps": 3}


def saved(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The checkpoints of the run in the order of their steps, read from disk."""
    folders = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return [load_file(path / "model.safetensors") for path in folders]


def weights(kind: str, count: int) -> list[float]:
    if kind == "ema":
        return [0.9 ** (count - 1 - i) * (1 if i == 0 else 0.1) for i in range(count)]
    last = min(count, 2) if kind == "lawa" else count
    return [0.0] * (count - last) + [1 / last] * last


@pytest.mark.parametrize("kind", ["swa", "ema", "lawa"])
def test_the_average_is_that_of_the_checkpoints_on_disk(kind: str, tmp_path: Path) -> None:
    callback = AverageCheckpoints(kind, decay=0.9, window=2)
    train(tmp_path, callback, **SAVES)
    states = saved(tmp_path)
    assert callback.count == len(states) == 4
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, tensor in found.items():
        shares = zip(weights(kind, 4), states, strict=True)
        expected = sum(share * state[name].double() for share, state in shares)
        assert torch.allclose(tensor.double(), expected, atol=1e-7), name
    assert BertForSequenceClassification.from_pretrained(tmp_path / "averaged").num_labels == 2


def test_every_start_out_and_load(tmp_path: Path) -> None:
    callback = AverageCheckpoints("swa", every=2, start=0.5, out=tmp_path / "mean", load=True)
    model = train(tmp_path / "run", callback, **SAVES)
    assert callback.count == 4  # steps 6, 8, 10 and 12 of 12
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found.items())


@pytest.mark.slow
def test_a_second_run_has_an_average_of_its_own(tmp_path: Path) -> None:
    callback = AverageCheckpoints("swa")
    train(tmp_path / "first", callback, **SAVES)
    train(tmp_path / "second", callback, **SAVES)
    assert callback.count == 4
    first, second = (load_file(tmp_path / run / "averaged" / "model.safetensors") for run in ("first", "second"))
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items()), "the runs are the same"


def test_nothing_to_average_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing to average, so nothing is written: there were 12 steps"):
        train(tmp_path, AverageCheckpoints("swa", every=100), **SAVES)
    assert not (tmp_path / "averaged").exists()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RequestError, match="Did you mean 'swa'"):
        AverageCheckpoints("sva")
    with pytest.raises(RequestError, match="decay=2"):
        AverageCheckpoints("ema", decay=2)
