"""The form and the text say the same, and the text loses nothing."""

from __future__ import annotations

import pytest
import yaml

from isomerge.studio.recipe_form import FormModel, RecipeForm, methods, read_form, write_form
from studio.conftest import Studio

MODELS = [FormModel(model="a", weight="0.3"), FormModel(model="b", weight="[0, 0.5, 1]")]
FORM = RecipeForm(method="ties", base="base", align="rotation", models=MODELS, options={"density": "0.5"})


def test_a_form_becomes_the_recipe_that_it_shows() -> None:
    assert yaml.safe_load(write_form("", FORM)) == {
        "merge_method": "ties",
        "base_model": "base",
        "models": [
            {"model": "a", "parameters": {"weight": 0.3}},
            {"model": "b", "parameters": {"weight": [0, 0.5, 1]}},
        ],
        "parameters": {"density": 0.5},
        "align": {"level": "rotation"},
    }


def test_a_form_that_is_written_and_read_is_the_same() -> None:
    assert read_form(write_form("", FORM)) == FORM
    assert read_form("") == RecipeForm() == read_form(write_form("", RecipeForm()))


def test_what_the_form_has_no_field_for_stays() -> None:
    text = """
merge_method: linear
models:
- model: a
  parameters: {weight: 1, normalize: true}
  data: texts.txt
- model: b
tokenizer: {source: union}
align: {level: full, sweeps: 3}
dtype: bfloat16
"""
    form = read_form(text)
    assert form is not None
    form.models[0].weight = "0.25"
    form.align = "permutation"
    expected = yaml.safe_load(text)
    expected["models"][0]["parameters"]["weight"] = 0.25
    expected["align"]["level"] = "permutation"
    assert yaml.safe_load(write_form(text, form)) == expected


def test_what_is_cleared_in_the_form_leaves_the_text() -> None:
    text = write_form("", FORM)
    cleared = RecipeForm(method="linear", models=[FormModel(model="b")])
    assert yaml.safe_load(write_form(text, cleared)) == {"merge_method": "linear", "models": [{"model": "b"}]}


@pytest.mark.parametrize(
    "text",
    [
        "slices: []",
        "a: 1\n---\nb: 2",
        "- a",
        "models: {a: 1}",
        "models: [a, b]",
        "models: [{model: [a]}]",
        "models: [{model: a, parameters: 3}]",
        "merge_method: [ties]",
        "parameters: 3",
        "a: [",
        "&a [*a]",
    ],
)
def test_a_text_without_a_form_says_so_and_is_left_alone(studio: Studio, text: str) -> None:
    answer = studio.post("recipe", text=text)
    assert answer["form"] is None and answer["text"] == text and answer["problems"]


@pytest.mark.parametrize("typed", ["0.5", "[1, 0.5]", "true", "a: b: c", "[", "- ", "#", "'", "null"])
def test_whatever_is_typed_into_a_field_ends_in_a_text(studio: Studio, typed: str) -> None:
    """And in words where it cannot be meant."""
    form = {"method": "linear", "models": [{"model": "a", "weight": typed}, {"model": "b"}]}
    answer = studio.post("recipe", text="", form=form)
    assert yaml.safe_load(answer["text"])["models"][1] == {"model": "b"}
    assert bool(answer["problems"]) is (typed not in ("0.5", "[1, 0.5]"))


def test_a_form_of_another_shape_is_refused(studio: Studio) -> None:
    for form in ({"models": "a"}, {"models": [{}]}, {"options": [1]}, []):
        assert "Reload the page" in studio.refused("recipe", text="", form=form)


def test_every_method_is_offered_with_its_options() -> None:
    offered = {one["name"]: one for one in methods()}
    assert {"linear", "slerp", "ties", "reconstruct"} < set(offered)
    assert offered["slerp"]["base"] == "required"
    assert {one["name"] for one in offered["ties"]["options"]} >= {"weight", "density", "lambda"}
