"""A word that an argument does not know is refused with the nearest known one, and the error names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isomerge
from isomerge.listing import catalogue
from isomerge.training import AverageCheckpoints
from models import image_pair
from samples import digits

STATES = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]


def recipe(a: str, b: str) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": a}, {"model": b, "parameters": {"weight": 1}}]}


def swept(a: str, b: str, **words: Any) -> object:
    return isomerge.sweep(recipe(a, b), {"models[1].weight": "0:1:0.5"}, data=digits(), **words)


Call = Callable[[str, str], object]
UNKNOWN: list[tuple[str, str, Call]] = [
    ("kind", "methods", lambda a, b: catalogue("metods")),
    ("kind", "lawa", lambda a, b: AverageCheckpoints("lawaa")),
    ("method", "linear", lambda a, b: isomerge.merge([a, b], method="linaer")),
    ("method", "linear", lambda a, b: isomerge.merge_state_dicts(STATES, method="linaer")),
    ("mode", "together", lambda a, b: swept(a, b, mode="togehter")),
    ("by", "metric", lambda a, b: swept(a, b, by="metrc")),
    ("task", "image", lambda a, b: isomerge.evaluate(a, digits(), task="imgae")),
    ("kind", "images", lambda a, b: isomerge.evaluate(a, {"path": digits(), "kind": "image"})),
    ("lenght", "length", lambda a, b: isomerge.evaluate(a, {"path": digits(), "lenght": 8})),
    ("what", "gram", lambda a, b: isomerge.calibrate(a, digits(), what={"grm"})),
    ("fisher", "empirical", lambda a, b: isomerge.calibrate(a, digits(), what={"fisher"}, fisher="empiricl")),
    ("level", "rotation", lambda a, b: isomerge.align(b, a, level="rotatoin")),
    ("many", "universe", lambda a, b: isomerge.align_family([a, b], many="univers")),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "meant", "call"), UNKNOWN, ids=[f"{name}={word}" for name, word, _ in UNKNOWN])
def test_an_unknown_word_is_refused_with_the_nearest_one(argument: str, meant: str, call: Call) -> None:
    with pytest.raises(isomerge.RequestError) as refused:
        call(*image_pair())
    assert refused.value.keys == (argument,)
    assert f"Did you mean '{meant}'?" in str(refused.value)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("models", lambda a, b: isomerge.merge_recipe(recipe(a, b), models={"typo": {}})),
        ("sweeps", lambda a, b: isomerge.align(b, a, sweeps=0)),
        ("samples", lambda a, b: isomerge.calibrate(a, digits(), what={"fisher"}, samples=0)),
        ("what", lambda a, b: isomerge.calibrate(a, digits(), what=())),
        ("search", lambda a, b: isomerge.sweep(recipe(a, b), {"models[1].weight": "0:1"}, data=digits(), search=2)),
    ],
)
def test_other_values_are_refused_by_the_name_of_its_argument(argument: str, call: Call) -> None:
    with pytest.raises(isomerge.RequestError) as refused:
        call(*image_pair())
    assert refused.value.keys == (argument,)
