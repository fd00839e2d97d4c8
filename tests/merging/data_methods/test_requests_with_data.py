"""What makes no sense with data is told at once, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

import isomerge
from isomerge.choices import DATA_KINDS
from isomerge.errors import RequestError
from isomerge.merging.api import planned
from isomerge.merging.data_methods import ALL_METHODS, DATA_METHODS, MergedWeights, MergeInputs
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.recipe import DataSettings, RecipeError, load_recipe
from models import image_pair as pair
from models import model, tensors
from samples import SENTENCES, digits

TWO = "models:\n- model: a\n- model: b\n"
OWN = "models:\n- {model: a, data: x}\n- {model: b, data: y}\n"
SLICES = "slices:\n- sources:\n  - {model: a, layer_range: [0, 1]}\n  - {model: b, layer_range: [0, 1]}\n"

CASES = {
    "reconstruct without data": ("merge_method: reconstruct\n" + TWO, 1, "it needs 'data'"),
    "reconstruct with slices": ("merge_method: reconstruct\n" + SLICES + "data: x\n", 2, "use 'models' instead of"),
    "reconstruct with a base": ("merge_method: reconstruct\nbase_model: c\n" + TWO + "data: x\n", 2, "has no base"),
    "reconstruct with a tokenizer": (
        "merge_method: reconstruct\n" + TWO + "data: x\ntokenizer_source: union\n", 6, "leave 'tokenizer' out"),
    "another anchor": (
        "merge_method: reconstruct\n" + TWO + "data: x\nalign:\n  anchor: b\n", 7, "put b first in 'models'"),
    "a gradient for a whole model": (
        "merge_method: reconstruct\n" + TWO + "data: x\nparameters:\n  ridge: [0, 1]\n", 7,
        "holds for the whole model"),
    "a negative ridge": (
        "merge_method: reconstruct\n" + TWO + "data: x\nparameters:\n  ridge: -1\n", 7, "must not be negative"),
    "a share above 1": (
        "merge_method: regmean++\n" + OWN + "parameters:\n  alpha: 2\n", 6, "is a share between 0 and 1"),
    "one data set for regmean++": ("merge_method: regmean++\n" + TWO + "data: x\n", 3, "each model's own data"),
    "a model without its data": (
        "merge_method: regmean++\nmodels:\n- {model: a, data: x}\n- model: b\n", 4, "this model needs 'data'"),
    "soup without data": ("merge_method: greedy_soup\n" + TWO, 1, "on data with labels: it needs 'data'"),
    "soup on the data of each": ("merge_method: greedy_soup\n" + OWN + "data: z\n", 3, "a model's own data is for"),
    "a base for adamerging that is also a model": (
        "merge_method: adamerging\nbase_model: a\n" + TWO + "data: x\n", 4, "is the base, which adamerging does not"),
    "adamerging without a base": ("merge_method: adamerging\n" + TWO + "data: x\n", 1, "needs 'base_model'"),
    "another anchor than the base": (
        "merge_method: adamerging\nbase_model: c\n" + TWO + "data: x\nalign:\n  anchor: b\n", 8,
        "aligns the models to the base"),
    "adapter soup without the data of a model": (
        "merge_method: adapter_soup\nbase_model: c\n" + TWO + "data: x\n", 4, "this model needs 'data'"),
    "adapter soup without the data of the task": (
        "merge_method: adapter_soup\nbase_model: c\n" + OWN, 1, "the recipe needs 'data', too"),
    "fisher without anything": ("merge_method: fisher\n" + TWO, 1, "files under 'importance'"),
    "regmean without anything": ("merge_method: regmean\n" + TWO, 1, "files under 'statistics'"),
    "fisher with a tokenizer": (
        "merge_method: fisher\n" + TWO + "data: x\ntokenizer: {}\n", 6, "leave 'tokenizer' out"),
    "data that nothing uses": ("merge_method: linear\n" + TWO + "data: x\n", 5, "nothing uses it: linear takes none"),
    "data beside files": (
        "merge_method: fisher\n" + TWO + "data: x\nparameters: {importance: f.safetensors}\n", 5,
        "fisher has its files"),
    "data, aligned by weights": (
        "merge_method: linear\n" + TWO + "data: x\nalign: {evidence: weights}\n", 5, "nothing uses it"),
    "a model's data that nothing uses": ("merge_method: linear\n" + OWN, 3, "linear does not"),
    "calibrate for nothing": (
        "merge_method: linear\n" + TWO + "calibrate: {fisher: true}\n", 5,
        "elastic_weight_removal, esm, ewc, fisher, regmean"),
    "calibrate beside files": (
        "merge_method: fisher\n" + TWO + "calibrate: {}\nparameters: {importance: f.safetensors}\n", 5,
        "leave 'calibrate' out"),
    "fisher's words for regmean": (
        "merge_method: regmean\n" + OWN + "calibrate:\n  fisher: empirical\n", 6, "'fisher' is of Fisher information"),
    "regmean's words for fisher": (
        "merge_method: fisher\n" + OWN + "calibrate:\n  only: mlp\n", 6, "'only' is of Gram matrices"),
    "repair without data": ("merge_method: linear\n" + TWO + "repair: true\n", 5, "it needs 'data'"),
    "repair by models without data of their own": (
        "merge_method: linear\n" + TWO + "data: x\nrepair: {goals: own}\n", 6, "needs data beside every model"),
    "repair of slices": (
        "merge_method: linear\n" + SLICES + "data: x\nrepair: true\n", 7, "use 'models', not 'slices'"),
    "activations of nothing": (
        "merge_method: linear\n" + TWO + "align:\n  evidence: {residual: mix}\n", 6, "activations are seen on data"),
    "a measure of weights": ("merge_method: linear\n" + TWO + "align:\n  measure: l2\n", 6, "the weights decide here"),
    "align's data unused": (
        "merge_method: linear\n" + TWO + "align:\n  evidence: weights\n  data: x\n", 7, "the evidence is the weights"),
    "unknown evidence": (
        "merge_method: linear\n" + TWO + "data: x\nalign:\n  evidence: some\n", 7, "evidence is weights"),
    "unknown key of data": (
        "merge_method: reconstruct\n" + TWO + "data:\n  path: x\n  limt: 3\n", 7, "Did you mean 'limit'?"),
    "data without a path": ("merge_method: reconstruct\n" + TWO + "data: {limit: 3}\n", 5, "data needs 'path'"),
    "a kind of data": (
        "merge_method: reconstruct\n" + TWO + "data:\n  path: x\n  kind: image\n", 7, "Did you mean 'images'?"),
    "no column": ("merge_method: greedy_soup\n" + TWO + "data:\n  path: x\n  label: 1.5\n", 7, "a column is a name"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_makes_no_sense_is_told_with_its_line(case: str) -> None:
    text, line, words = CASES[case]
    with pytest.raises(RecipeError) as caught:
        load_recipe(text)
    lines = [place for place, problem in caught.value.problems if words in problem]
    assert lines and lines[0] == line, caught.value


def test_all_problems_are_told_at_once() -> None:
    text = "merge_method: greedy_soup\nbase_model: c\n" + SLICES + "repair: true\ncalibrate: {}\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(text)
    assert [line for line, _ in caught.value.problems] == [1, 2, 3, 7, 7, 8]


def test_recipes_with_data_are_written_and_read_back() -> None:
    text = (
        "merge_method: regmean++\nmodels:\n- {model: a, data: x.csv}\n"
        "- {model: b, data: {path: y, text: 0, limit: 5}}\n"
        "data: {path: z, split: test, seed: 3}\nalign: {evidence: {residual: mix}, site: pre}\nrepair: {only: mlp}\n"
    )
    (recipe,) = load_recipe(text)
    assert load_recipe(recipe.to_yaml()) == [recipe] and recipe.mergekit_yaml() is None
    assert recipe.models is not None and recipe.models[1].data is not None and recipe.models[1].data.text == "0"
    (short,) = load_recipe("merge_method: fisher\n" + TWO + "data: x\nrepair: true\nalign: true\n")
    assert load_recipe(short.to_yaml()) == [short] and short.repair is not None


def test_the_kinds_of_data_are_those_that_can_be_opened() -> None:
    assert tuple(DataSettings.model_json_schema()["properties"]["kind"]["anyOf"][0]["enum"]) == DATA_KINDS


def test_what_the_data_itself_says_is_known_before_anything_runs(tmp_path: Path) -> None:
    a, b = pair()
    models = {"models": [{"model": a}, {"model": b}]}
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES))
    for recipe, words in (
        ({"merge_method": "reconstruct", "data": str(tmp_path / "no.csv"), **models}, "there is no such file"),
        ({"merge_method": "greedy_soup", "data": str(texts), **models}, "the model reads images and the data is"),
        (
            {"merge_method": "reconstruct", "data": str(digits()), "parameters": {"weight": 0}, **models},
            "need a positive sum",
        ),
    ):
        with pytest.raises(RequestError, match=words):
            planned(load_recipe(recipe))


def test_values_that_only_the_method_can_judge_are_found_in_the_plan() -> None:
    a, b = pair()
    text = "merge_method: {}\nbase_model: {}\nmodels:\n- model: {}\nparameters:\n  density: 0.9\n  epsilon: 0.2\n"
    with pytest.raises(RecipeError, match=r"density 0.9 and epsilon 0.2 make probabilities.*line 6.*line 7"):
        planned(load_recipe(text.format("della", a, b)))
    preferences = {
        "merge_method": "rewarded_soup",
        "models": [{"model": a}, {"model": b}],
        "parameters": {"weight": 0.7},
    }
    with pytest.raises(RecipeError, match="add up to 1.4"):
        planned(load_recipe(preferences))


def test_a_method_may_do_without_data_and_with_models_of_other_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    @data_method(data="optional", passes="none", name="first_of_all", any_width=True)
    def first_of_all(inputs: MergeInputs) -> MergedWeights:
        """The first model."""
        first = inputs.models[0]
        return MergedWeights(
            {name: first.read(name) for name in first.tensors}, first.tensors, record={"sets": len(inputs.data)}
        )

    monkeypatch.setitem(ALL_METHODS, "first_of_all", DATA_METHODS.pop("first_of_all"))
    monkeypatch.setitem(DATA_METHODS, "first_of_all", ALL_METHODS["first_of_all"])
    small, wide = pair()[0], str(model("vit", 3, hidden_size=24, num_attention_heads=4))
    recipe = {"merge_method": "first_of_all", "models": [{"model": small}, {"model": wide}]}
    merged = isomerge.merge_recipe(recipe)
    assert merged.report()["sets"] == 0 and merged.state_dict().keys() == tensors(Path(small)).keys()
    assert isomerge.merge_recipe({**recipe, "data": digits()}).report()["sets"] == 1
    with pytest.raises(RequestError, match="num_attention_heads is 3 and 4"):
        isomerge.merge_recipe({**recipe, "merge_method": "linear"})


def test_one_folder_is_one_model_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    for name, place in zip("ab", pair(), strict=True):
        shutil.copytree(place, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"\./a is here twice"):
        load_recipe({"merge_method": "linear", "models": [{"model": "a"}, {"model": "./a"}]})
    recipe = {
        "merge_method": "ties",
        "base_model": str(tmp_path / "a"),
        "models": [{"model": "a"}, {"model": "b"}],
        "align": {"anchor": "./a/"},
    }
    (read,) = load_recipe(recipe)
    assert [str(model) for model in read.referenced_models()] == [str(tmp_path / "a"), "b"]
    assert list(planned([read]).inputs) == [str(tmp_path / "a"), "b"]
