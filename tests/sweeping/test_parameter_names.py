"""Names of parameters against recipes written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from isomerge.errors import RequestError
from isomerge.merging.recipe import load_recipe
from isomerge.sweeping.parameter_names import changed
from isomerge.sweeping.points import one_recipe, points_of

TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [{"model": "runs/model-1.5", "parameters": {"weight": 0.3}}, {"model": "other"}],
    "parameters": {"density": 0.5},
}


def with_models(first: dict[str, Any], second: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    models = [{"model": "runs/model-1.5", "parameters": first}, {"model": "other", "parameters": second}]
    models = [{key: value for key, value in entry.items() if value} for entry in models]
    return {**TIES, "models": models, "parameters": shared}


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("density", 0.2, with_models({"weight": 0.3}, {}, {"density": 0.2})),
        ("weight", 2.0, with_models({"weight": 2.0}, {"weight": 2.0}, {"density": 0.5})),
        ("models[1].weight", 2.0, with_models({"weight": 0.3}, {"weight": 2.0}, {"density": 0.5})),
        ("models.1.weight", 2.0, with_models({"weight": 0.3}, {"weight": 2.0}, {"density": 0.5})),
        ("models[1].parameters.weight", 2.0, with_models({"weight": 0.3}, {"weight": 2.0}, {"density": 0.5})),
        ("model-1.5.density", 0.1, with_models({"weight": 0.3, "density": 0.1}, {}, {"density": 0.5})),
        ("runs/model-1.5.weight", 1, with_models({"weight": 1}, {}, {"density": 0.5})),
        ("t", 0.25, with_models({"weight": 0.75}, {"weight": 0.25}, {"density": 0.5})),
        ("merge_method", "dare_ties", {**TIES, "merge_method": "dare_ties"}),
        ("seed", 3, {**TIES, "seed": 3}),
        ("align", True, {**TIES, "align": True}),
        ("align.level", "rotation", {**TIES, "align": {"level": "rotation"}}),
    ],
)
def test_a_name_is_these_places(name: str, value: Any, result: dict[str, Any]) -> None:
    assert changed(TIES, {name: value}) == result
    assert TIES["parameters"] == {"density": 0.5}


def test_align_true_can_be_refined() -> None:
    assert changed({**TIES, "align": True}, {"align.sweeps": 3})["align"] == {"sweeps": 3}


def test_a_value_of_one_slice_gives_way_to_the_value_for_all() -> None:
    sources = [{"model": m, "layer_range": [0, 2]} for m in ("base", "b")]
    recipe = {
        "merge_method": "slerp",
        "base_model": "base",
        "slices": [{"sources": sources, "parameters": {"t": [0, 0.5]}}],
        "parameters": {"t": 0.3},
    }
    got = changed(recipe, {"t": 0.7})
    assert got["slices"][0]["parameters"] == {"t": 0.7} and got["parameters"] == {"t": 0.7}
    assert changed(recipe, {"slices[0].t": 0.7})["parameters"] == {"t": 0.3}
    assert changed(recipe, {"slices[0].parameters.t[1]": 0.9})["slices"][0]["parameters"] == {"t": [0, 0.9]}


def test_the_method_is_changed_first() -> None:
    recipe = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "base_model": "c"}
    got = changed(recipe, {"density": 0.5, "merge_method": "ties"})
    assert [entry["parameters"] for entry in got["models"]] == [{"density": 0.5}, {"density": 0.5}]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"densty": 1}, "Did you mean 'density'"),
        ({"nothing_like_it": 1}, "What can be varied here: "),
        ({"nothing_like_it": 1}, "t (the share of the second model), models.0."),
        ({"nothing_like_it": 1}, "models.1.weight (other)"),
        ({"model-c.weight": 1}, "Did you mean 'model-1.5'"),
        ({"models.weight": 1}, "'models' is a list. Say which entry, counted from 0: models.0.weight"),
        ({"models[2].weight": 1}, "'models' has 2 entries, counted from 0: the last is models.1"),
        ({"models[1].t": 1}, "this method has no 't'. Its options: density, int8_mask, lambda"),
        ({"merge_method[0]": 1}, "'merge_method' is no list"),
        ({"merge_method.x": 1}, "has no 'x'"),
        ({"models[x]": 1}, "written as in"),
        ({"density": 1.5}, "share between 0 and 1, and is 1.5"),
        ({"density": "much"}, "must be a number"),
        ({"merge_method": "tise"}, "Did you mean 'ties'"),
        ({"align.levle": "full"}, "level"),
        ({"t": "x"}, "share of the second model"),
    ],
)
def test_what_cannot_be_swept_is_told(values: dict[str, Any], words: str) -> None:
    (recipe,) = load_recipe(TIES)
    with pytest.raises(RequestError, match="Sweeping") as caught:
        points_of(recipe, [values])
    assert words in str(caught.value)


def test_every_option_of_the_method_is_named_where_a_name_is_wrong() -> None:
    (recipe,) = load_recipe(TIES)
    with pytest.raises(RequestError) as caught:
        points_of(recipe, [{"nothing_like_it": 1}])
    named = str(caught.value).partition("What can be varied here: ")[2].split(", ")
    assert {"density", "int8_mask", "lambda", "normalize", "weight"} <= set(named)


def test_all_wrong_values_are_told_at_once() -> None:
    (recipe,) = load_recipe(TIES)
    with pytest.raises(RequestError, match="2 problems.*density=-1.*density=2"):
        points_of(recipe, [{"density": -1}, {"density": 0.5}, {"density": 2}])


def test_t_is_no_share_of_three_models() -> None:
    (recipe,) = load_recipe({"merge_method": "linear", "models": [{"model": m} for m in "abc"]})
    with pytest.raises(RequestError, match="two models by weight"):
        points_of(recipe, [{"t": 0.5}])


def test_a_name_that_two_models_share_is_refused() -> None:
    recipe = {"merge_method": "linear", "models": [{"model": "x/m"}, {"model": "y/m"}]}
    with pytest.raises(RequestError, match="x/m and y/m are called so"):
        changed(recipe, {"m.weight": 1})
    assert changed(recipe, {"y/m.weight": 1})["models"][1]["parameters"] == {"weight": 1}


def test_a_recipe_of_several_documents_is_refused() -> None:
    text = "name: x\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\n---\n"
    text += "merge_method: linear\nmodels: [{model: x}, {model: c}]\n"
    with pytest.raises(RequestError, match="2 documents"):
        one_recipe(text)
