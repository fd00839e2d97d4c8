"""A few faults of each kind, the same at every run; `python -m fuzz.faults` tries all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.faults import FAULTS, Attack, commands


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    work = (tmp_path_factory.mktemp("faults") / "work").resolve()
    work.mkdir()
    yield Attack(commands(work)["merge --force"], work)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["journal.jsonl", ".old/", "replace out/.isomerge-partial/config.json"])
def test_a_model_that_is_being_replaced_survives(attack: Attack, place: str, fault: str) -> None:
    at = next(number for number, call in enumerate(attack.calls, start=1) if place in call)
    before = len(attack.problems)
    attack.one(at, fault, seed=at)
    assert attack.problems[before:] == []


def test_the_attack_notices_a_model_that_is_a_mix(attack: Attack) -> None:
    """A control: what it compares does differ."""
    attack._reset()
    (attack.out / "config.json").write_text(Path(attack.out / "config.json").read_text() + " ")
    assert attack._opens({"config.json": "other"}) == "a mix of both models opens"
