"""Everything that is wrong is said at once, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from isomerge.errors import RequestError
from isomerge.merging.recipe import RecipeError, load_recipe
from merging.recipe.skeletons import checkpoint, decoder, decoder_shapes, plan

TWO = "models:\n- model: a\n- model: b\n"
LINEAR = "merge_method: linear\n" + TWO  # four lines
TIES = "merge_method: ties\nbase_model: c\n" + TWO  # five lines


def problems(text: str) -> list[tuple[int | None, str]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(text)
    return caught.value.problems


CASES = {
    "unknown key": (LINEAR + "dtpye: float32\n", 5, "Did you mean 'dtype'?"),
    "unknown key of a model": ("merge_method: linear\nmodels:\n- model: a\n  modle: x\n", 4, "Did you mean 'model'?"),
    "option outside parameters": ("merge_method: linear\nmodels:\n- model: a\n  weight: 1\n", 4, "under 'parameters'"),
    "misplaced key": ("merge_method: linear\nmodels:\n- model: a\n  chat_template: x\n", 4, "belongs to a recipe"),
    "left over from mergekit": (
        "merge_method: linear\nslices:\n- sources:\n  - {model: a, layer_range: [0, 1]}\n  residual_weight: 1\n",
        5,
        "never uses it",
    ),
    "wrong type": (LINEAR + "seed: many\n", 5, "'seed' must be a whole number, and is 'many'"),
    "switch for a number": (LINEAR + "seed: true\n", 5, "'seed' must be a whole number, and is true"),
    "models as text": ("merge_method: linear\nmodels:\n- a\n- model: b\n", 3, "write '- model: a' instead of '- a'"),
    "models as a mapping": ("merge_method: linear\nmodels:\n  model: b\n", 2, "'models' must be a list"),
    "number as model": ("merge_method: linear\nmodels:\n- model: 7\n", 3, "put it in quotes"),
    "unknown method": ("merge_method: tiess\n" + TWO, 1, "Did you mean 'ties'?"),
    "no method": (TWO, 1, "a recipe needs 'merge_method'"),
    "unknown option": (TIES + "parameters:\n  densitty: 0.5\n", 7, "Did you mean 'density'?"),
    "option of another method": (LINEAR + "parameters:\n  density: 0.5\n", 6, "is not an option of linear"),
    "text for a number": (LINEAR + "parameters:\n  weight: much\n", 6, "'weight' must be a number, and is 'much'"),
    "switch as weight": (LINEAR + "parameters:\n  weight: true\n", 6, "'weight' must be a number, and is true"),
    "empty value": (LINEAR + "parameters:\n  weight:\n", 6, "'weight' must be a number, and is empty"),
    "text in a gradient": (LINEAR + "parameters:\n  weight:\n  - 0.1\n  - x\n", 8, "'weight' must be a number"),
    "empty gradient": (LINEAR + "parameters:\n  weight: []\n", 6, "'weight' is empty"),
    "unknown key beside a filter": (
        LINEAR + "parameters:\n  weight:\n  - filtr: mlp\n    value: 1\n",
        7,
        "Did you mean 'filter'?",
    ),
    "filter without value": (LINEAR + "parameters:\n  weight:\n  - filter: mlp\n", 7, "a filter needs 'value'"),
    "values mixed with filters": (
        LINEAR + "parameters:\n  weight:\n  - 0.5\n  - filter: mlp\n    value: 1\n",
        7,
        "must be a mapping",
    ),
    "shared option of one model": (
        "merge_method: slerp\nbase_model: a\nmodels:\n- model: a\n- model: b\n  parameters:\n    t: 0.5\n",
        7,
        "one value for all models",
    ),
    "no base": ("merge_method: ties\n" + TWO, 1, "ties needs 'base_model'"),
    "required option": ("merge_method: nearswap\nbase_model: a\n" + TWO, 1, "nearswap needs the option 't'"),
    "too many models": (
        "merge_method: slerp\nbase_model: c\n" + TWO, 3, "exactly 1 model besides the base, and here are 2",
    ),
    "too few models": (
        "merge_method: model_stock\nbase_model: a\n" + TWO, 3, "at least 2 models besides the base, and here is 1",
    ),
    "the same model twice": ("merge_method: linear\nmodels:\n- model: a\n- model: a\n", 4, "first at line 3"),
    "base not in a slice": (
        "merge_method: ties\nbase_model: c\nslices:\n- sources:\n  - {model: a, layer_range: [0, 1]}\n", 4, "add it",
    ),
    "models and slices": (
        LINEAR + "slices:\n- sources:\n  - {model: a, layer_range: [0, 1]}\n", 1, "here are 'models' and 'slices'",
    ),
    "neither models nor slices": ("merge_method: linear\ndtype: float32\n", 1, "none of them is here"),
    "range backwards": (
        "merge_method: linear\nslices:\n- sources:\n  - model: a\n    layer_range: [4, 2]\n", 5, "holds no layer",
    ),
    "range of one number": (
        "merge_method: linear\nslices:\n- sources:\n  - model: a\n    layer_range: [4]\n", 5, "[first, end)",
    ),
    "unknown dtype": (LINEAR + "dtype: bf61\n", 5, "Did you mean 'bf16'?"),
    "dtype that cannot be merged": (LINEAR + "out_dtype: int64\n", 5, "not a floating-point dtype"),
    "both ways to name a tokenizer": (
        LINEAR + "tokenizer_source: union\ntokenizer: {source: union}\n", 5, "and both are given",
    ),
    "tokenizer of a missing base": (LINEAR + "tokenizer_source: base\n", 5, "there is no 'base_model'"),
    "token of a stranger": (
        LINEAR + "tokenizer:\n  tokens:\n    <s>:\n      source: bb\n", 8, "bb is not one of the models",
    ),
    "token twice described": (
        LINEAR + "tokenizer:\n  tokens:\n    x:\n      source: {kind: model_token, model: a, token: x, token_id: 3}\n",
        8,
        "exactly one of 'token' or 'token_id'",
    ),
    "unknown kind of token": (
        LINEAR + "tokenizer:\n  tokens:\n    <s>:\n      source: {kind: zeros}\n", 8, "is a model, {kind: zero}, or",
    ),
    "unknown level": (LINEAR + "align:\n  level: ful\n", 6, "Did you mean 'full'?"),
    "rescaled permutations": (LINEAR + "align: {level: permutation, scale: true}\n", 5, "nothing can be rescaled"),
    "strange layers": (LINEAR + "align: {layers: 0..4}\n", 5, "is not a layer"),
    "anchor that is no model": (LINEAR + "align:\n  anchor: model-a\n", 6, "is not one of the models"),
    "text for align": (LINEAR + "align: full\n", 5, "align must be a mapping"),
    "name outside": (LINEAR + "name: ../x\n", 5, "leads out of the folder"),
    "a list": ("- a\n- b\n", 1, "a recipe is a mapping"),
    "two plus signs": ("merge_method: linear\nmodels:\n- model: a+b+c\n", 3, "2 plus signs"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_told_with_its_line(case: str) -> None:
    text, line, words = CASES[case]
    found = problems(text)
    assert [(at, told) for at, told in found if at == line and words in told], found
    assert len(found) == 1, found


def test_all_mistakes_are_told_at_once() -> None:
    text = (
        "merge_method: ties\nmodels:\n- model: a\n  parameters: {wieght: 1}\n- b\n"
        "parameters:\n  density: x\ndtype: bf61\nalgin: true\n"
    )
    assert [line for line, _ in problems(text)] == [1, 4, 5, 7, 8, 9]
    with pytest.raises(RequestError, match=r"6 problems: \(1\) line 1: ties needs 'base_model'"):
        load_recipe(text)


def test_a_key_given_twice_names_both_lines() -> None:
    assert problems(LINEAR + "dtype: float32\nseed: 1\ndtype: float16\n") == [
        (7, "line 7: 'dtype' is given twice, on line 5 and on line 7; keep one of them")
    ]


def test_tabs_are_explained() -> None:
    ((line, told),) = problems("merge_method: linear\nmodels:\n\t- model: a\n")
    assert line == 3 and "YAML is indented with spaces only" in told


@pytest.mark.parametrize("text", ["\n", "# nothing\n", "---\n"])
def test_an_empty_recipe_says_what_a_recipe_has(text: str) -> None:
    ((_, told),) = problems(text)
    assert "there is nothing in it" in told and "merge_method" in told


def test_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.yml").write_text("merge_method: linear\n")
    with pytest.raises(RequestError, match="While reading .*my.yml: line 1"):
        load_recipe(tmp_path / "my.yml")
    with pytest.raises(RequestError, match="no such file"):
        load_recipe(str(tmp_path / "other.yml"))


def test_data_without_lines_is_told_by_its_path() -> None:
    with pytest.raises(RequestError, match=r"models\[0\]\.parameters\.weigth: 'weigth' is not an option"):
        load_recipe({"merge_method": "linear", "models": [{"model": "a", "parameters": {"weigth": 1}}]})


def test_documents_that_use_each_other_are_refused() -> None:
    text = "name: {}\nmerge_method: linear\nmodels: [{{model: {}}}]\n---\n"
    told = problems(text.format("x", "y") + text.format("y", "x"))
    assert any("in a circle: x → y → x" in one for _, one in told)
    same = "name: x\nmerge_method: linear\nmodels: [{model: a}]\n---\n"
    assert problems(same + same) == [(5, "line 5: the name 'x' is taken by the document at line 1")]
    unnamed = "merge_method: linear\nmodels: [{model: a}]\n---\n"
    assert "only one document may have no name" in problems(unnamed + unnamed)[0][1]


# --- against the models -----------------------------------------------------------------------------------------------
def planning_problems(text: str, **models: object) -> list[tuple[int | None, str]]:
    with pytest.raises(RecipeError) as caught:
        plan(text, models)  # type: ignore[arg-type]
    return caught.value.problems


def test_a_filter_that_is_in_no_name_is_told_with_its_line() -> None:
    ((line, told),) = planning_problems(
        LINEAR + "parameters:\n  weight:\n  - filter: self_atn\n    value: 1\n  - value: 0\n"
    )
    assert line == 7 and "'self_atn' of 'weight' is in no tensor's name. Did you mean 'self_attn'?" in told


def test_tensors_that_some_models_lack_and_other_shapes_are_listed_together() -> None:
    shapes = {**decoder_shapes(), "model.norm.weight": (9,)}
    del shapes["model.layers.3.mlp.up_proj.weight"]
    found = planning_problems(LINEAR, b=checkpoint(shapes, num_hidden_layers=5, vocab_size=16))
    told = " ".join(text for _, text in found)
    assert len(found) == 2
    assert "b lacks a tensor that others have: 'model.layers.3.mlp.up_proj.weight'" in told
    assert "model.norm.weight is (8,) in a, (9,) in b" in told


def test_ranges_beyond_the_model_and_unequal_slices_are_listed_together() -> None:
    text = (
        "merge_method: linear\nslices:\n- sources:\n  - {model: a, layer_range: [0, 3]}\n"
        "  - {model: b, layer_range: [0, 2]}\n- sources:\n  - model: a\n    layer_range: [3, 6]\n"
    )
    assert planning_problems(text) == [
        (3, "line 3: the sources differ in length: 3 of a, 2 of b layers"),
        (8, "line 8: layer_range [3, 6] ends beyond a, which has 5 layers (0 to 4)"),
    ]


def test_models_of_different_depth_need_slices() -> None:
    ((line, told),) = planning_problems(LINEAR, b=decoder(depth=7))
    assert line == 2 and "a has 5, b has 7" in told and "'slices'" in told


def test_a_filter_that_leaves_tensors_without_a_required_option_is_told() -> None:
    text = "merge_method: nearswap\nbase_model: a\n" + TWO + "parameters:\n  t:\n  - filter: mlp\n    value: 0.1\n"
    ((line, told),) = planning_problems(text)
    assert line == 7 and "nearswap needs 't', and no filter gives it" in told


def test_a_gradient_of_whole_numbers_must_hit_them() -> None:
    text = "merge_method: karcher\n" + TWO + "parameters:\n  max_iter: [1, 4]\n"
    assert any("must be a whole number" in told for _, told in planning_problems(text))


def test_unknown_modules_are_told_with_those_there_are() -> None:
    text = "merge_method: linear\nmodules:\n  text_decoder:\n    models:\n    - model: a\n"
    ((line, told),) = planning_problems(text)
    assert line == 3 and "Known values: default" in told
