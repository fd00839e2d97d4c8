"""What the page lists, checks and says while a recipe is typed."""

from __future__ import annotations

import json
import os
import shlex

import pytest

import isomerge
from studio.conftest import Studio

TEXT = "merge_method: linear\nmodels:\n- model: a\n- model: b\n"


def test_models_are_listed_with_type_and_size(studio: Studio) -> None:
    (studio.folder / ".hidden").mkdir()
    (studio.folder / "a").rename(studio.folder / ".hidden" / "a")
    (studio.folder / "texts.txt").write_text("some")
    (studio.folder / "adapter").mkdir()
    (studio.folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (studio.folder / "adapter" / "adapter_model.safetensors").write_bytes(b"12345678")
    listing = studio.get("listing")
    weights = (studio.folder / "b" / "model.safetensors").stat().st_size
    assert listing["models"][0] == {
        "path": "adapter", "kind": "adapter", "type": "LORA", "dtype": None, "bytes": 8,
    }  # fmt: skip
    assert listing["models"][1] == {
        "path": "b", "kind": "model", "type": "llama", "dtype": "float32", "bytes": weights,
    }  # fmt: skip
    assert listing["models"][2]["path"] == "deep/c" and listing["models"][2]["type"] == "bert"
    assert listing["data"] == ["texts.txt"] and listing["recipes"] == [] and listing["outputs"] == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": 7}', '{"kind": "merge"}', "\0"])
def test_files_that_are_damaged_stop_no_listing(studio: Studio, content: str) -> None:
    for name in ("config.json", "isomerge.json"):
        (studio.folder / "a" / name).write_text(content)
    (studio.folder / "broken.yml").symlink_to("nowhere")
    listing = studio.get("listing")
    assert [one["type"] for one in listing["models"]][:2] == ["unknown", "llama"]
    assert [one["kind"] for one in listing["outputs"]] == ["damaged"]


def test_a_wrong_word_is_said_with_its_line_and_what_was_meant(studio: Studio) -> None:
    answer = studio.post("recipe", text="merge_method: linear\nmodels:\n- model: a\n  paramters: {weight: 1}\n")
    (problem,) = answer["problems"]
    assert problem["line"] == 4 and "Did you mean 'parameters'?" in problem["text"] and answer["plan"] is None


def test_a_recipe_that_fits_has_the_plan_of_the_library(studio: Studio) -> None:
    plan = studio.post("recipe", text=TEXT)["plan"]
    expected = isomerge.plan(TEXT).to_dict()
    for key in ("tensors", "bytes_read", "bytes_written", "models", "method"):
        assert plan[key] == expected[key]
    assert plan["peak_memory_bytes"] > 0


def test_models_that_do_not_fit_are_said_while_typing(studio: Studio) -> None:
    (problem,) = studio.post("recipe", text=TEXT.replace("b", "deep/c"))["problems"]
    assert problem["line"] is None and "'llama'" in problem["text"] and "'bert'" in problem["text"]


def test_a_model_of_the_hub_is_no_mistake_and_not_downloaded_while_typing(studio: Studio) -> None:
    answer = studio.post("recipe", text=TEXT.replace("- model: b", "- model: org/of-the-hub"))
    assert answer["remote"] == ["org/of-the-hub"] and answer["problems"] == [] and answer["plan"] is None


def test_the_verdict_is_that_of_check_and_comes_with_its_command(studio: Studio) -> None:
    answer = studio.post("check", models=["a", "b"])
    expected = isomerge.check("a", "b").to_dict()
    for key in ("summary", "verdict", "reasons", "recipe", "distance", "suggestion"):
        assert answer["result"][key] == pytest.approx(expected[key])
    assert answer["command"] == "isomerge check a b"


def test_models_that_went_away_are_told(studio: Studio) -> None:
    assert "no nothing" in studio.refused("check", models=["a", "nothing"])
    assert "at least two" in studio.refused("check", models=["a"])
    assert "models must be" in studio.refused("check", models="a")


def test_a_recipe_is_kept_beside_its_output_and_not_overwritten(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(studio.jobs, "add", lambda words, out=None: asked.append(words) or type("J", (), {"number": 1}))
    first = studio.post("merge", text=TEXT, out="new/-merged")
    assert (studio.folder / "new" / "-merged.yml").read_text() == TEXT
    assert shlex.split(first["command"]) == ["isomerge", *asked[0]]
    assert asked[0] == ["merge", "new/-merged.yml", "-o", "new/-merged"]
    other = TEXT.replace("linear", "task_arithmetic")
    assert "holds another recipe" in studio.refused("merge", text=other, out="new/-merged")
    studio.post("merge", text=TEXT, out="new/-merged")
    studio.post("merge", text=other, out="new/-merged", force=True)
    assert (studio.folder / "new" / "-merged.yml").read_text() == other and asked[-1][-1] == "--force"
    studio.post("sweep", text=TEXT, out="-swept", over="t=0:1:0.5 -x=1", data="a/config.json")
    assert asked[-1] == [
        "sweep", "./-swept.yml", "--over", "t=0:1:0.5", "--over", "./-x=1", "--data", "a/config.json", "-o", "./-swept",
    ]  # fmt: skip
    studio.post("merge", text=TEXT, out="~root/merged")
    assert asked[-1] == ["merge", "./~root/merged.yml", "-o", "./~root/merged"]
    assert "cannot be the folder" in studio.refused("merge", text=TEXT, out=".")
    assert "cannot be the folder" in studio.refused("again", out=".")


def test_lineage_goes_back_as_far_as_records_do(studio: Studio) -> None:
    def record(name: str, *parents: str) -> None:
        (studio.folder / name).mkdir(exist_ok=True)
        inputs = [{"reference": parent, "role": "model"} for parent in parents]
        content = {"kind": "merge", "format": 1, "isomerge": "0.1.0", "method": "ties", "inputs": inputs}
        (studio.folder / name / "isomerge.json").write_text(json.dumps(content))

    record("grandchild", "child", "org/elsewhere", "grandchild")
    record("child", "a", "b")
    tree = studio.post("lineage", path="grandchild")
    assert tree["made"] == "ties" and [one["name"] for one in tree["parents"]] == [
        "child",
        "org/elsewhere",
        "grandchild",
    ]
    child, elsewhere, itself = tree["parents"]
    assert [one["name"] for one in child["parents"]] == ["a", "b"] and child["made"] == "ties"
    assert elsewhere["parents"] == itself["parents"] == []


def test_a_result_has_the_verdict_of_its_page_and_the_last_written_is_first(studio: Studio) -> None:
    for number, name in enumerate(("older", "newer")):
        isomerge.merge([studio.folder / "a", studio.folder / "b"]).save(studio.folder / name)
        os.utime(studio.folder / name / "model.safetensors", (number, number))
    newer, older = studio.get("listing")["outputs"]
    assert (newer["path"], newer["label"], older["label"]) == ("newer", "Measure it", "Measure it")
    score = {"task": "causal-lm", "metric_name": "accuracy", "higher_is_better": True, "loss": 1.0, "metric": 0.5}
    for file, model in (("eval.json", "older"), ("eval-1.json", "a")):
        (studio.folder / "older" / file).write_text(json.dumps({"model": model, **score}))
    newer, older = studio.get("listing")["outputs"]
    assert (older["tone"], older["label"]) == ("good", "Keeps its parents' quality") and newer["tone"] == "caution"


def test_the_points_of_a_sweep_are_shown_as_recorded(studio: Studio) -> None:
    (studio.folder / "swept").mkdir()
    record = {"parameters": [{"name": "t"}], "points": [{"parameters": {"t": 0}, "loss": 1.0, "metric": None}]}
    (studio.folder / "swept" / "sweep.json").write_text(json.dumps(record))
    assert [one["kind"] for one in studio.get("listing")["outputs"]] == ["sweep"]
    assert studio.post("points", path="swept") == record
    (studio.folder / "swept" / "sweep.json").write_text("{}")
    assert "no record of a sweep" in studio.refused("points", path="swept")
    assert "Run the sweep again" in studio.refused("points", path="a")
