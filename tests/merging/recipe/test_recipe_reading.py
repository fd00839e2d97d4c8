"""Recipes of every kind are read, written back, and made in Python."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from isomerge.alignment.activations import MEASURES, SITES
from isomerge.alignment.api import align_family
from isomerge.alignment.scope import LEVELS, PARTS
from isomerge.choices import MANY, ORDER_SOLVERS
from isomerge.errors import RequestError
from isomerge.merging.recipe import AlignSettings, ModelReference, Recipe, load_recipe, recipe_of
from isomerge.merging.recipe.definitions import ModelToken, ZeroToken
from merging.recipe.skeletons import recipe

EXAMPLES = {
    "averages": """
merge_method: linear
models:
  - model: org/model-a@main
    parameters: {weight: 1.0}
  - model: org/model-b
    parameters: {weight: 0.0}
dtype: bf16
out_dtype: fp16
""",
    "arcs with filters and gradients": """
merge_method: slerp
base_model: org/model-a
slices:
  - sources:
      - {model: org/model-a, layer_range: [0, 32]}
      - {model: org/model-b, layer_range: [0, 32]}
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
""",
    "task vectors": """
merge_method: ties
base_model: base
models:
  - model: a
    parameters:
      density: [1, 0.7, 0.1]
      weight: 1.0
  - model: b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1]
  - model: c
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
parameters: {normalize: true, int8_mask: true}
dtype: float16
""",
    "stacked layers": """
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 24]}]
  - sources:
      - model: b
        layer_range: [8, 32]
        parameters:
          scale:
            - {filter: o_proj, value: 0.0}
            - {filter: down_proj, value: 0.0}
            - value: 1.0
""",
    "modules": """
merge_method: slerp
base_model: a
modules:
  text_decoder:
    slices:
      - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]
        base_model: b
        parameters: {t: 0.1}
    parameters: {t: 0.2}
  vision_tower:
    models: [{model: a}, {model: b}]
parameters: {t: 0.3}
""",
    "tokens": """
merge_method: linear
base_model: a
models: [{model: a}, {model: b+adapter@v2}]
tokenizer:
  source: union
  tokens:
    <|im_start|>: {source: a, force: true}
    <|im_end|>:
      source: {kind: zero}
    "1":
      source: {kind: model_token, model: a, token: "</s>"}
    yes:
      source: {kind: model_token, model: a, token_id: 3}
  pad_to_multiple_of: 32
chat_template: |
  {% for m in messages %}{{ m.content }}{% endfor %}
""",
    "alignment": """
merge_method: linear
models: [{model: a}, {model: b}]
align: {level: rotation, anchor: b, layers: "0-4,7", scale: false, sweeps: 3, only: attention}
seed: 7
name: mine
""",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_recipe_written_back_reads_the_same(kind: str) -> None:
    first = recipe(EXAMPLES[kind])
    assert recipe(first.to_yaml()) == first
    assert recipe(first.to_yaml()).to_yaml() == first.to_yaml()


def test_what_was_written_is_what_is_read() -> None:
    average = recipe(EXAMPLES["averages"])
    assert average.models is not None
    assert average.models[0].model == ModelReference("org/model-a", "main")
    assert average.models[1].parameters == {"weight": 0.0}
    assert (average.dtype, average.out_dtype) == ("bfloat16", "float16")
    tokens = recipe(EXAMPLES["tokens"])
    assert tokens.tokenizer is not None and tokens.tokenizer.tokens is not None
    rows = tokens.tokenizer.tokens
    assert list(rows) == ["<|im_start|>", "<|im_end|>", "1", "yes"]
    assert rows["<|im_start|>"].source == ModelReference("a") and rows["<|im_start|>"].force
    assert isinstance(rows["<|im_end|>"].source, ZeroToken)
    assert isinstance(rows["1"].source, ModelToken) and rows["1"].source.token == "</s>"
    assert tokens.models is not None and tokens.models[1].model == ModelReference("b", None, "adapter", "v2")
    aligned = recipe(EXAMPLES["alignment"])
    assert aligned.align == AlignSettings(
        level="rotation", anchor=ModelReference("b"), layers="0-4,7", scale=False, sweeps=3, only="attention"
    )
    assert (aligned.seed, aligned.name) == (7, "mine")


def test_models_are_in_the_order_of_the_file_with_the_base_first() -> None:
    names = [str(model) for model in recipe(EXAMPLES["task vectors"]).referenced_models()]
    assert names == ["base", "a", "b", "c"]
    assert [str(m) for m in recipe(EXAMPLES["stacked layers"]).referenced_models()] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1.e3", 1000.0), ("2", 2.0), ("-0.5", -0.5), ("0.0", 0.0)]
)
def test_numbers_are_numbers_however_they_are_written(text: str, value: float) -> None:
    read = recipe(f"merge_method: linear\nmodels: [{{model: a}}]\nparameters: {{weight: [{text}, {text}]}}\n")
    assert read.parameters == {"weight": (value, value)}


def test_short_forms_are_the_long_ones() -> None:
    models = "merge_method: linear\nbase_model: a\nmodels: [{model: a}]\n"
    assert recipe(models + "tokenizer_source: base\n") == recipe(models + "tokenizer: {source: base}\n")
    assert recipe(models + "align: true\n") == recipe(models + "align: {level: full}\n")
    assert recipe(models + "align: false\n") == recipe(models)
    one = models + "parameters: {weight: {filter: mlp, value: 2}}\n"
    assert recipe(one) == recipe(models + "parameters: {weight: [{filter: mlp, value: 2}]}\n")


def test_anchors_and_merge_keys_of_yaml_work() -> None:
    text = (
        "merge_method: linear\nmodels:\n- model: a\n  parameters: &p {weight: 0.2}\n- model: b\n  parameters:\n"
        "    <<: *p\n- model: c\n  parameters: *p\n"
    )
    read = recipe(text)
    assert read.models is not None and [m.parameters for m in read.models] == [{"weight": 0.2}] * 3


def test_the_callers_data_stays_as_it_is() -> None:
    data = {
        "merge_method": "linear",
        "models": [{"model": "a", "parameters": {"weight": "1e-3"}}],
        "tokenizer_source": "a",
    }
    load_recipe(data)
    assert data["tokenizer_source"] == "a" and data["models"] == [{"model": "a", "parameters": {"weight": "1e-3"}}]


def test_python_makes_the_recipe_that_yaml_makes() -> None:
    text = """
merge_method: ties
base_model: x
models:
  - {model: a, parameters: {density: 0.5}}
  - {model: b, parameters: {density: 0.2}}
parameters: {lambda: 0.9, weight: 2}
align: {level: permutation}
dtype: bfloat16
seed: 3
"""
    made = recipe_of(
        ["a", Path("b")], "ties", "x", {"density": [0.5, 0.2], "lambda": 0.9, "weight": 2}, {"level": "permutation"},
        dtype="bf16", seed=3,
    )  # fmt: skip
    assert made == recipe(text)
    assert recipe_of(["a", "b"]) == recipe("merge_method: linear\nmodels: [{model: a}, {model: b}]\n")
    gradient = recipe_of(["a"], "slerp", "x", {"t": [0, 1]})
    assert gradient.parameters == {"t": (0.0, 1.0)}
    with pytest.raises(RequestError, match="3 values for 2 models"):
        recipe_of(["a", "b"], options={"weight": [1, 2, 3]})


def test_documents_come_in_the_order_they_are_needed() -> None:
    step = "merge_method: linear\nmodels: [{{model: {0}}}, {{model: b}}]\n"
    text = (
        step.format("second")
        + "---\nname: second\n"
        + step.format("first@x+y")
        + "---\nname: first\n"
        + step.format("a")
    )
    assert [one.name for one in load_recipe(text)] == ["first", "second", None]
    named = "name: first\n" + step.format("a") + "---\nname: last\n" + step.format("first")
    assert [one.name for one in load_recipe(named)] == ["first", "last"]


def test_align_offers_what_alignment_has() -> None:
    schema = AlignSettings.model_json_schema()["properties"]
    assert tuple(schema["level"]["enum"]) == LEVELS
    assert tuple(schema["only"]["anyOf"][0]["enum"]) == PARTS
    assert tuple(schema["measure"]["enum"]) == MEASURES and tuple(schema["site"]["enum"]) == SITES
    assert tuple(schema["many"]["enum"]) == MANY and tuple(schema["solver"]["enum"]) == ORDER_SOLVERS
    known = inspect.signature(align_family).parameters
    options = AlignSettings.model_validate({}).options()
    assert options == {name: known[name].default for name in options}
    assert schema.keys() - options.keys() == {"anchor", "data"}


def test_recipes_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        recipe(EXAMPLES["averages"]).seed = 4  # type: ignore[misc]
    assert Recipe.model_config["frozen"]


# --- references -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/model", ModelReference("org/model")),
        ("org/model@abc", ModelReference("org/model", "abc")),
        ("org/model+org/lora", ModelReference("org/model", None, "org/lora")),
        ("org/model@1+org/lora@2", ModelReference("org/model", "1", "org/lora", "2")),
    ],
)
def test_references_are_read_and_written_back(text: str, expected: ModelReference) -> None:
    assert ModelReference.parse(text) == expected
    assert str(expected) == text


def test_a_plus_or_an_at_sign_in_a_path_that_exists_is_part_of_it(tmp_path: Path) -> None:
    odd = tmp_path / "model+v2@home"
    odd.mkdir()
    assert ModelReference.parse(str(odd)) == ModelReference(str(odd))
    assert ModelReference.parse(f"{odd}+org/lora@1") == ModelReference(str(odd), None, "org/lora", "1")
    assert recipe_of([str(odd), "b"]).mergekit_yaml() is None  # mergekit would read an adapter there


@pytest.mark.parametrize("text", ["+lora", "model+", "a@b@c", "@x"])
def test_references_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write model\+adapter|not of the form"):
        ModelReference.parse(text)


def test_the_long_form_of_mergekit_is_read() -> None:
    text = "merge_method: linear\nmodels: [{model: {model: {path: my model, revision: x}, lora: {path: l}}}]\n"
    assert recipe(text).referenced_models() == [ModelReference("my model", "x", "l")]
