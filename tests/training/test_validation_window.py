"""SWAD's callback: the steps in the window, against the paper's algorithm written out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

from isomerge.errors import RequestError
from isomerge.training import ValidationWindow
from merging.data_methods.swad_by_hand import window_of
from training.runs import Watch, arrays, assert_near, train


class Losses(TrainerCallback):
    """Evaluations with losses of the test's choice, or the Trainer's own where there are none."""

    def __init__(self, losses: list[float] | None) -> None:
        self.losses = losses
        self.seen: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        if self.losses is not None:
            metrics["eval_loss"] = self.losses[len(self.seen)]
        self.seen.append(metrics["eval_loss"])


RUNS = {
    "ends": [3.0, 2.0, 1.0, 1.1, 1.2, 1.25, 2.0, 2.1, 2.2, 0.1],
    "lasts": [3.0, 2.0, 1.0, 1.1, 1.2, 1.25, 1.1, 1.0, 1.2, 1.1],
    "long overfit": [1.0, 1.1, 1.2, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    "real": None,
}


@pytest.mark.filterwarnings("ignore:ValidationWindow found no minimum")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("optimum", "overfit"),
    [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_the_average_is_that_of_every_step_in_the_window(run: str, optimum: int, overfit: int, tmp_path: Path) -> None:
    losses, watch = Losses(RUNS[run]), Watch()
    callback = ValidationWindow(optimum=optimum, overfit=overfit, tolerance=1.2, load=True)
    model = train(tmp_path, losses, watch, callback, steps=20, eval_strategy="steps", eval_steps=2)
    assert callback.losses == losses.seen[: len(callback.losses)] and len(losses.seen) == 10
    inside = window_of(losses.seen, optimum, overfit, 1.2)
    assert inside is not None or run == "real"
    start, stop = inside or (9, 10)
    steps = watch.after[2 * start : 2 * stop]
    expected = {name: np.mean([step[name] for step in steps], 0) for name in steps[0]}
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    assert_near({name: tensor.double().numpy() for name, tensor in found.items()}, expected)
    assert_near(arrays(model), expected)


class Peer(TrainerCallback):
    """torch's own average of every step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mean = AveragedModel(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mean.update_parameters(kwargs["model"])


def test_a_window_of_the_whole_run_is_the_average_of_torch(tmp_path: Path) -> None:
    peer = Peer()
    train(tmp_path, Losses([1.0] * 4), peer, ValidationWindow(), steps=8, eval_strategy="steps", eval_steps=2)
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    assert_near({name: tensor.double().numpy() for name, tensor in found.items()}, arrays(peer.mean.module))


def test_a_loss_that_still_falls_leaves_the_last_steps(tmp_path: Path) -> None:
    watch = Watch()
    with pytest.warns(UserWarning, match=r"no minimum of eval_loss in 4 evaluations"):
        train(
            tmp_path, Losses([4.0, 3.0, 2.0, 1.0]), watch, ValidationWindow(), steps=8,
            eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
    expected = {name: (watch.after[6][name] + watch.after[7][name]) / 2 for name in watch.after[7]}
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    assert_near({name: tensor.double().numpy() for name, tensor in found.items()}, expected)


def test_a_run_that_is_never_evaluated_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Set eval_strategy of the Trainer"):
        train(tmp_path, ValidationWindow(), steps=2)
    assert not (tmp_path / "averaged").exists()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RequestError, match=r"tolerance \(0\.5\)"):
        ValidationWindow(tolerance=0.5)
