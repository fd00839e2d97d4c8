"""PAPA and HWA: members trained side by side, in threads and through a folder, against the rules in numpy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isomerge.errors import CheckpointError, RequestError
from isomerge.training import PopulationAverage, hierarchical_average
from training.runs import Watch, Weights, arrays, assert_near, small_model, train, trainer


def side_by_side(folder: Path, callbacks: Callable[[str], list[Any]], names: str = "abc", steps: int = 9) -> list[Any]:
    """Members of different seeds in threads of this process: what watched each before and after its callbacks.

    The Trainers are made one after the other: accelerate, on which they rest, resets what all of them share."""
    watched = {name: (Watch(), Watch()) for name in names}
    made = [
        trainer(folder / f"run-{name}", before, *callbacks(name), after, seed=ord(name), steps=steps)
        for name, (before, after) in watched.items()
    ]
    with ThreadPoolExecutor(len(made)) as pool:
        for done in [pool.submit(one.train) for one in made]:
            done.result()
    return list(watched.values())


def mean(weights: list[Weights]) -> Weights:
    return {name: np.mean([own[name] for own in weights], 0) for name in weights[0]}


@pytest.mark.slow
@pytest.mark.parametrize("pull", [0.25, 1.0])
def test_every_n_steps_each_member_is_drawn_to_the_mean_of_all(pull: float, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = side_by_side(tmp_path, lambda name: [PopulationAverage(shared, name, 3, every=4, pull=pull, wait=60.0)])
    for step in range(1, 10):
        before = [run[0].after[step - 1] for run in runs]
        for own, (_, after) in zip(before, runs, strict=True):
            centre = mean(before)
            drawn = {name: (1 - pull) * own[name] + pull * centre[name] for name in own}
            assert_near(after.after[step - 1], own if step % 4 else drawn, 0 if step % 4 else 1e-6)
    if pull == 1.0:  # whatever their order, all members have the same bits
        assert all(np.array_equal(runs[0][1].after[7][k], runs[1][1].after[7][k]) for k in runs[0][1].after[7])
    assert sorted(path.name for path in (shared / "a").iterdir()) == [
        "step-000000004.safetensors", "step-000000008.safetensors",
    ]  # fmt: skip


@pytest.mark.slow
def test_hwa_is_the_mean_over_time_of_the_means_over_members(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    runs = side_by_side(
        tmp_path, lambda name: hierarchical_average(shared, name, 2, every=3, window=2, wait=60.0), names="ab", steps=9
    )
    outer = [mean([run[0].after[step - 1] for run in runs]) for step in (3, 6, 9)]
    expected = mean(outer[-2:])
    for name in "ab":
        found = load_file(tmp_path / f"run-{name}" / "averaged" / "model.safetensors")
        assert_near({key: tensor.double().numpy() for key, tensor in found.items()}, expected)


def test_without_waiting_the_latest_weights_of_the_others_count(tmp_path: Path) -> None:
    model = small_model(5)
    others = {name: torch.full_like(tensor, 2.0) for name, tensor in model.state_dict().items()}
    old = {name: torch.full_like(tensor, -7.0) for name, tensor in others.items()}
    (tmp_path / "b").mkdir()
    save_file(old, tmp_path / "b" / "step-000000001.safetensors")
    save_file(others, tmp_path / "b" / "step-000000033.safetensors")
    (tmp_path / "b" / "step-000000050.partial").write_bytes(b"half a file")
    before, after = Watch(), Watch()
    callback = PopulationAverage(tmp_path, "a", 5, every=2, pull=0.5, wait=0.0)
    train(tmp_path / "run", before, callback, after, steps=2)
    own = before.after[1]
    assert_near(after.after[1], {name: 0.5 * own[name] + 0.5 * (own[name] + 2.0) / 2 for name in own})


def test_a_member_that_crashed_writes_its_later_steps_again(tmp_path: Path) -> None:
    home = tmp_path / "shared" / "a"
    home.mkdir(parents=True)
    stale = {name: torch.full_like(tensor, 9.0) for name, tensor in small_model().state_dict().items()}
    save_file(stale, home / "step-000000004.safetensors")
    before, after = Watch(), Watch()
    train(tmp_path / "run", before, PopulationAverage(home.parent, "a", 1, every=2, wait=5.0), after, steps=4)
    assert_near(after.after[3], before.after[3])
    found = load_file(home / "step-000000004.safetensors")
    assert_near({key: tensor.double().numpy() for key, tensor in found.items()}, before.after[3])


def test_a_member_that_is_behind_takes_the_earliest_later_weights_of_the_others(tmp_path: Path) -> None:
    """As after a crash: the others wait for it further on, and keep their last two."""
    (tmp_path / "b").mkdir()
    for step, value in ((6, 1.0), (8, 5.0)):
        ahead = {name: torch.full_like(tensor, value) for name, tensor in small_model().state_dict().items()}
        save_file(ahead, tmp_path / "b" / f"step-{step:09d}.safetensors")
    before, after = Watch(), Watch()
    callback = PopulationAverage(tmp_path, "a", 2, every=4, pull=1.0)
    train(tmp_path / "run", before, callback, after, steps=8)
    for step, value in ((4, 1.0), (8, 5.0)):
        own = before.after[step - 1]
        assert_near(after.after[step - 1], {name: (own[name] + value) / 2 for name in own})


def test_members_that_do_not_come_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    callback = PopulationAverage(tmp_path / "shared", "a", 2, every=2, wait=0.1)
    with pytest.raises(CheckpointError, match=r"only a of 2 members have reached step 2\. Start the others"):
        train(tmp_path / "run", callback, steps=2)


def test_too_many_members_and_other_architectures_are_refused(tmp_path: Path) -> None:
    for name in "bc":
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(1)}, tmp_path / name / "step-000000002.safetensors")
    with pytest.raises(RequestError, match="a, b, c are there"):
        train(tmp_path / "run", PopulationAverage(tmp_path, "a", 2, every=2), steps=2)
    with pytest.raises(CheckpointError, match="Train members of one architecture"):
        train(tmp_path / "run", PopulationAverage(tmp_path, "a", 3, every=2), steps=2)


def test_the_model_is_left_alone_where_the_population_is_one(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", steps=4)
    alone = train(tmp_path / "run", PopulationAverage(tmp_path / "shared", "a", 1, every=2, pull=1.0), steps=4)
    assert_near(arrays(alone), arrays(plain), 0)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="pull=0"):
        PopulationAverage(tmp_path, "a", 2, pull=0.0)
    with pytest.raises(RequestError, match="cannot be the name of a folder"):
        PopulationAverage(tmp_path, "../a", 2)
