"""`check` says what models are to each other; `selftest` proves a specification on the model at hand."""

from __future__ import annotations

import pytest

import isomerge
from isomerge.errors import RequestError
from models import MODELS, WIDE, model, noisy, tensors


@pytest.mark.parametrize("family", MODELS)
def test_a_fine_tune_is_a_sibling_and_another_seed_is_a_stranger(family: str) -> None:
    base = model(family, 0, **WIDE[family])
    sibling = isomerge.check(base, noisy(base, 0.02))
    assert sibling["verdict"] == "siblings" and not sibling["alignment_helps"], sibling["reasons"]
    stranger = isomerge.check(base, model(family, 1, **WIDE[family]))
    assert stranger["verdict"] == "strangers" and stranger["alignment_helps"]
    assert "--align" in stranger["suggestion"]


def test_the_same_model_twice_is_identical() -> None:
    assert isomerge.check(model("vit", 0), model("vit", 0))["verdict"] == "identical"


def test_the_distance_and_the_sign_conflict_are_those_of_the_tensors() -> None:
    first, second = model("bert", 0), model("bert", 1)
    a, b = tensors(first), tensors(second)
    layers = [n for n in a if a[n].ndim > 1 and ".layer." in n]
    apart = sum(float((a[n] - b[n]).square().sum()) for n in layers)
    size = sum(float(a[n].square().sum()) for n in layers)
    conflict = sum(int((a[n] * b[n] < 0).sum()) for n in a) / sum(t.numel() for t in a.values())
    found = isomerge.check(first, second)
    assert found["distance"] == pytest.approx((apart / size) ** 0.5, rel=1e-9)
    assert found["sign_conflict"] == pytest.approx(conflict, rel=1e-9)


def test_models_that_do_not_fit_together_are_incompatible_and_every_reason_is_listed() -> None:
    found = isomerge.check(model("vit", 0), model("bert", 0))
    assert found["verdict"] == "incompatible" and "'vit' and 'bert'" in found["reasons"][0]
    found = isomerge.check(model("bert", 0), model("bert", 0, hidden_size=24, num_hidden_layers=3))
    assert found["verdict"] == "incompatible"
    assert any("width" in r for r in found["reasons"]) and any("depth" in r for r in found["reasons"])


def test_three_models_are_compared_pair_by_pair_and_the_worst_pair_gives_the_verdict() -> None:
    base = model("vit", 0, **WIDE["vit"])
    found = isomerge.check(base, noisy(base, 0.02), model("vit", 1, **WIDE["vit"]))
    assert found["verdict"] == "strangers"
    assert [p["verdict"] for p in found["pairs"]] == ["siblings", "strangers", "strangers"]


def test_one_model_alone_cannot_be_checked() -> None:
    with pytest.raises(RequestError, match="at least two"):
        isomerge.check(model("vit", 0))
