"""Points that cannot be merged, parameters that hide each other, and what must not be taken from an earlier run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import isomerge
from isomerge.errors import CheckpointError, RequestError
from isomerge.sweeping.measuring import Bench
from models import llama
from samples import SENTENCES


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three small language models and a book."""
    for seed, name in enumerate("abc"):
        llama(tmp_path / name, seed=seed)
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES))
    return tmp_path


def linear(folder: Path, **more: Any) -> dict[str, Any]:
    models = [{"model": str(folder / name)} for name in "ab"]
    return {"merge_method": "linear", "models": models, "parameters": {"normalize": False}, **more}


def della(folder: Path) -> dict[str, Any]:
    models = [{"model": str(folder / name), "parameters": {"weight": 0.5}} for name in "bc"]
    return {"merge_method": "della", "base_model": str(folder / "a"), "models": models, "parameters": {"density": 0.5}}


# --- no numbers -------------------------------------------------------------------------------------------------------
def test_a_point_too_large_for_its_dtype_is_shown_and_ends_nothing(texts: Path) -> None:
    recipe = linear(texts, dtype="float16")
    whole: dict[str, Any] = {"data": texts / "book.txt", "out": texts / "out"}
    got = isomerge.sweep(recipe, {"models[0].weight": [1e6, 1, 1e7, 2]}, **whole)
    losses = [point.loss for point in got.points]
    assert [loss != loss for loss in losses] == [True, False, True, False]
    assert got.best.loss == min(losses[1] or 0.0, losses[3] or 0.0)
    notes = " ".join(got.record["notes"])
    assert "too large for float16" in notes and "no number at models[0].weight=1e+06; models[0].weight=1e+07" in notes
    assert json.loads((texts / "out" / "sweep.json").read_text())["points"][0]["loss"] is None
    recipe["models"][0]["parameters"] = {"weight": 2}
    isomerge.merge_recipe(recipe).save(texts / "two")
    assert losses[3] == pytest.approx(isomerge.evaluate(texts / "two", texts / "book.txt")["loss"], rel=1e-6)
    again = isomerge.sweep(linear(texts, dtype="float16"), {"models[0].weight": [1e6, 1, 1e7, 2]}, **whole)
    assert [point.loss for point in again.points] == pytest.approx(losses, nan_ok=True)


def test_a_sweep_without_any_number_has_no_best(texts: Path) -> None:
    with pytest.raises(CheckpointError, match=r"models\[0\].weight=1e\+06: .* too large for float16"):
        isomerge.sweep(
            linear(texts, dtype="float16"), {"models[0].weight": [1e6, 1e7]}, data=texts / "book.txt", out=texts / "out"
        )
    assert not (texts / "out" / "best.yml").exists()
    with pytest.raises(CheckpointError, match="none of the 2 points gives a number"):
        isomerge.sweep(linear(texts), {"models[0].weight": [1, 2]}, loss=lambda module: float("nan"))


def test_a_start_that_cannot_be_merged_does_not_spoil_the_test(texts: Path) -> None:
    (texts / "other.txt").write_text("\n".join(SENTENCES[:7]))
    recipe = linear(texts, dtype="float16")
    recipe["models"][0]["parameters"] = {"weight": 1e7}
    got = isomerge.sweep(recipe, {"models[0].weight": [1, 2]}, data=texts / "book.txt", test=texts / "other.txt")
    assert got.record["test"]["start"]["loss"] != got.record["test"]["start"]["loss"]
    assert got.record["test"]["best"]["loss"] > 0


def test_an_infinite_metric_stays_the_worst_when_it_is_known_already(texts: Path) -> None:
    recipe = linear(texts)
    recipe["parameters"]["weight"] = [{"filter": "lm_head", "value": 1}, {"value": 1}]
    over = {"parameters.weight[0].value": [1e4, 1]}
    whole: dict[str, Any] = {"data": texts / "book.txt", "out": texts / "out"}
    first = isomerge.sweep(recipe, over, **whole)
    assert first.points[0].metric == float("inf")  # exp of a loss above 700
    again = isomerge.sweep(recipe, over, **whole, by="metric")
    assert again.record["kept"] == 2 and again.best.parameters == {"parameters.weight[0].value": 1}


# --- one module for all points ----------------------------------------------------------------------------------------
def test_tables_that_are_tied_as_long_as_they_are_equal(texts: Path) -> None:
    """Stored twice under a config that ties them; random masks make them differ from the second point on."""
    for name in "ab":
        file, config = texts / name / "model.safetensors", texts / name / "config.json"
        state = load_file(file)
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, file, metadata={"format": "pt"})
        config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    recipe = {"merge_method": "dare_linear", "base_model": str(texts / "a"), "models": [{"model": str(texts / "b")}]}
    got = isomerge.sweep(recipe, {"density": [1.0, 0.5, 0.3]}, data=texts / "book.txt")
    for point in got.points:
        isomerge.merge_recipe([point.recipe]).save(texts / "one", force=True)
        assert point.loss == pytest.approx(isomerge.evaluate(texts / "one", texts / "book.txt")["loss"], rel=1e-6)


def test_a_module_that_was_left_in_training_is_not_measured_so(texts: Path) -> None:
    modes = []

    def loss(module: Any) -> float:
        modes.append(module.training)
        module.train()
        return 1.0

    isomerge.sweep(linear(texts), {"models[0].weight": [1, 2, 3]}, loss=loss)
    assert modes == [False, False, False]


def test_a_load_that_fails_leaves_nothing_to_copy_into(texts: Path) -> None:
    over = {"dtype": ["float32", "float16", "float32"], "models[0].weight": [1, 1e7, 2]}
    got = isomerge.sweep(linear(texts), over, mode="together", data=texts / "book.txt")
    recipe = linear(texts, dtype="float32")
    recipe["models"][0]["parameters"] = {"weight": 2}
    isomerge.merge_recipe(recipe).save(texts / "one")
    assert got.points[2].loss == pytest.approx(isomerge.evaluate(texts / "one", texts / "book.txt")["loss"], rel=1e-6)
    assert got.points[1].loss != got.points[1].loss


# --- refused before anything is measured ------------------------------------------------------------------------------
def test_every_point_is_planned_before_the_first_is_measured(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_put", lambda *_: pytest.fail("a point was measured"))
    with pytest.raises(RequestError, match=r"density=0.1, epsilon=0.3: .*outside \(0, 1\)"):
        isomerge.sweep(della(texts), {"density": [0.5, 0.1], "epsilon": [0.05, 0.3]}, data=texts / "book.txt")
    with pytest.raises(RequestError, match="give the same recipe"):
        isomerge.sweep(linear(texts), {"models[0].weight": [1, 2], "weight": [1, 3]}, data=texts / "book.txt")
    with pytest.raises(RequestError, match="device 'cuda:99'"):
        isomerge.sweep(linear(texts), {"models[0].weight": [1, 2]}, data=texts / "book.txt", device="cuda:99")


def test_the_same_weight_for_all_is_told_with_the_address_of_one(texts: Path) -> None:
    recipe = {**linear(texts), "parameters": {}}
    with pytest.raises(RequestError, match=r"to weight=0: .*add up to zero.*models\.1\.weight.*or t for the share"):
        isomerge.sweep(recipe, {"weight": "0:1:0.5"}, data=texts / "book.txt")
    got = isomerge.sweep(recipe, {"weight": "1,2,3"}, data=texts / "book.txt")
    assert any("all points are equal" in note and "models.0.weight" in note for note in got.record["notes"])


def test_data_is_used_by_the_points_that_need_it(texts: Path) -> None:
    """Each point is measured as the recipe that is written for it alone, where data that nothing uses is refused."""
    book = str(texts / "book.txt")
    found = {}
    for evidence, align in (("weights", {}), ("mix", {"data": book, "measure": "l2"})):
        alone = {**linear(texts), "parameters": {}, "align": {"evidence": evidence, **align}}
        found[evidence] = isomerge.sweep(alone, {"models.0.weight": [1]}, data=book).points[0].loss
    recipe = {**linear(texts), "parameters": {}, "align": {"evidence": "mix", "data": book, "measure": "l2"}}
    got = isomerge.sweep(recipe, {"align.evidence": "weights,mix"}, data=book)
    assert [point.loss for point in got.points] == pytest.approx([found["weights"], found["mix"]])
    assert got.points[0].recipe.align.data is None and got.points[1].recipe.align.data is not None
    assert found["weights"] != found["mix"]


@pytest.mark.parametrize(
    ("recipe", "over"),
    [
        ({"merge_method": "regmean", "calibrate": {"only": "q_proj"}}, {"merge_method": "linear,regmean"}),
        ({"align": True}, {"align": [True, False]}),
        ({"repair": True}, {"repair": [True, False]}),
    ],
)
def test_data_of_a_step_that_is_swept_away_is_no_mistake(
    texts: Path, recipe: dict[str, Any], over: dict[str, Any]
) -> None:
    book = str(texts / "book.txt")
    got = isomerge.sweep({**linear(texts), "parameters": {}, "data": book, **recipe}, over, data=book)
    assert sorted(point.recipe.data is None for point in got.points) == [False, True]


def test_data_that_no_point_uses_is_a_mistake(texts: Path) -> None:
    book = str(texts / "book.txt")
    recipe = {**linear(texts), "parameters": {}, "align": {"evidence": "mix", "data": book}}
    with pytest.raises(RequestError, match="nothing uses it: the evidence is the weights; leave 'data' out"):
        isomerge.sweep(recipe, {"align.evidence": ["weights"], "seed": [0, 1]}, data=book)


def test_the_bound_on_memory_is_kept(texts: Path) -> None:
    with pytest.raises(RequestError, match="max_memory 1MB"):
        isomerge.sweep(linear(texts), {"models[0].weight": [1]}, data=texts / "book.txt", max_memory="1MB")


def test_a_search_goes_round_values_that_do_not_go_together(texts: Path) -> None:
    over = {"density": "0.1:0.5", "epsilon": "0.05:0.3"}  # both corners are allowed, a quarter between is not
    got = isomerge.sweep(della(texts), over, data=texts / "book.txt", search=9)
    assert got.points and all(
        float(str(p.parameters["epsilon"])) < float(str(p.parameters["density"])) for p in got.points
    )
    assert any("cannot be merged" in note for note in got.record["notes"])


# --- not taken from an earlier run ------------------------------------------------------------------------------------
def edit_config(folder: Path) -> None:
    path = folder / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))


def edit_tokenizer(folder: Path) -> None:
    path = folder / "a" / "tokenizer.json"
    found = json.loads(path.read_text())
    words = found["model"]["vocab"]
    words["cat"], words["the"] = words["the"], words["cat"]
    path.write_text(json.dumps(found))


def edit_data_of_a_later_point(folder: Path) -> None:
    (folder / "second.txt").write_text("\n".join(SENTENCES[5:9]))


@pytest.mark.slow
@pytest.mark.parametrize("edit", [edit_config, edit_tokenizer, edit_data_of_a_later_point])
def test_what_was_edited_in_place_is_measured_again(texts: Path, edit: Any) -> None:
    for name in ("first", "second"):
        (texts / f"{name}.txt").write_text("\n".join(SENTENCES[:4]))
    models = [{"model": str(texts / name)} for name in "ab"]
    recipe = {"merge_method": "regmean", "models": models, "data": {"path": str(texts / "first.txt")}}
    over = {"data.path": [str(texts / "first.txt"), str(texts / "second.txt")]}
    whole: dict[str, Any] = {"data": texts / "book.txt", "out": texts / "out"}
    before = isomerge.sweep(recipe, over, **whole)
    assert isomerge.sweep(recipe, over, **whole).record["kept"] == 2
    edit(texts)
    again = isomerge.sweep(recipe, over, **whole)
    shutil.rmtree(texts / "out")
    fresh = isomerge.sweep(recipe, over, **whole)
    assert [point.loss for point in again.points] == [point.loss for point in fresh.points]
    assert again.points[1].loss != before.points[1].loss


def test_an_adapter_that_was_edited_in_place_is_measured_again(texts: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(texts / "a")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(texts / "adapter")
    models = [{"model": f"{texts / 'a'}+{texts / 'adapter'}"}, {"model": str(texts / "b")}]
    recipe = {"merge_method": "linear", "models": models}
    whole: dict[str, Any] = {"data": texts / "book.txt", "out": texts / "out"}
    before = isomerge.sweep(recipe, {"t": [0.3]}, **whole)
    path = texts / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 64}))
    assert isomerge.sweep(recipe, {"t": [0.3]}, **whole).best.loss != before.best.loss
