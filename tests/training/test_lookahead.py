"""Lookahead in a real Trainer against the rule written out in numpy."""

from __future__ import annotations

from pathlib import Path

import pytest

from isomerge.errors import RequestError
from isomerge.training import Lookahead
from training.runs import Watch, arrays, assert_near, train, trainer


def test_every_k_steps_the_model_is_set_back_to_the_slow_weights(tmp_path: Path) -> None:
    before, after = Watch(), Watch()
    model = train(tmp_path, before, Lookahead(every=3, share=0.4), after, steps=11)
    slow = before.begin
    for step in range(1, 12):
        if step % 3:
            assert_near(after.after[step - 1], before.after[step - 1], 0)
            continue
        fast = before.after[step - 1]
        slow = {name: slow[name] + 0.4 * (fast[name] - slow[name]) for name in slow}
        assert_near(after.after[step - 1], slow)
    assert_near(arrays(model), slow)  # step 9's: the two steps after it are left out


def test_a_share_of_one_is_the_optimiser_alone(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", steps=4)
    assert_near(arrays(train(tmp_path / "same", Lookahead(every=2, share=1.0), steps=4)), arrays(plain), 0)


def test_the_best_model_that_the_trainer_loads_at_the_end_stays(tmp_path: Path) -> None:
    when = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    made = trainer(tmp_path, Lookahead(every=2), steps=6, load_best_model_at_end=True, **when)
    made.train()
    best = type(made.model).from_pretrained(made.state.best_model_checkpoint)
    assert_near(arrays(made.model), arrays(best), 0)


def test_a_second_run_begins_with_its_own_weights(tmp_path: Path) -> None:
    callback = Lookahead(every=2)
    first = train(tmp_path / "first", callback, steps=4)
    assert_near(arrays(train(tmp_path / "second", callback, steps=4)), arrays(first), 0)


@pytest.mark.slow
def test_a_run_resumed_at_a_multiple_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    ended = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        made = trainer(tmp_path, Lookahead(every=4), steps=8, save_strategy="steps", save_steps=4)
        made.train(resume_from_checkpoint=resume)
        ended.append(arrays(made.model))
    assert_near(ended[1], ended[0])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RequestError, match="share=0"):
        Lookahead(share=0.0)
    with pytest.raises(RequestError, match="every=0"):
        Lookahead(every=0)
