"""Sweeps against models that `isomerge merge` writes, loaded by transformers and measured by a loop of torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

import isomerge
from isomerge.errors import CheckpointError, RequestError
from isomerge.running import weight_replacement
from isomerge.sweeping.measuring import Bench
from models import bert, llama, vit
from samples import DIGITS, SENTENCES, write_digits


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small image models, digits to measure on, and other digits."""
    folder = tmp_path_factory.mktemp("images")
    for seed, name in enumerate("abc"):
        vit(folder / name, DIGITS, seed=seed)
    write_digits(folder / "digits", 24)
    write_digits(folder / "others", 36)
    return folder


def truth(model: Path, count: int = 24) -> tuple[float, float]:
    """Cross-entropy and accuracy of a folder on the digits, without isomerge."""
    from sklearn.datasets import load_digits

    data = load_digits(n_class=3)
    pixels = torch.tensor(np.stack([(image * 15).astype(np.uint8) for image in data.images[:count]])).float()
    labels = torch.tensor(data.target[:count])
    loaded = AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = loaded((pixels[:, None] / 255 - 0.5) / 0.5).logits
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(-1) == labels).double().mean())


def counted(monkeypatch: pytest.MonkeyPatch, place: str) -> list[Any]:
    """The calls of a function, which is still called."""
    calls: list[Any] = []
    holder, _, name = place.rpartition(".")
    from importlib import import_module

    owner = import_module(holder)
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def recipe_in(folder: Path, **more: Any) -> dict[str, Any]:
    models = [{"model": str(folder / "b"), "parameters": {"weight": 0.6}}, {"model": str(folder / "c")}]
    return {"merge_method": "ties", "base_model": str(folder / "a"), "models": models, **more}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param({"align": True}, id="aligned", marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, id="rounded"),
    ],
)
def test_every_point_is_the_model_that_merge_writes(images: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    recipe = recipe_in(images, **more)
    got = isomerge.sweep(recipe, {"density": [0.3, 0.9], "b.weight": [0.2, 1.0]}, data=images / "digits")
    assert [point.parameters for point in got.points] == [
        {"density": 0.3, "b.weight": 0.2}, {"density": 0.3, "b.weight": 1.0},
        {"density": 0.9, "b.weight": 0.2}, {"density": 0.9, "b.weight": 1.0},
    ]  # fmt: skip
    for number, point in enumerate(got.points):
        recipe["parameters"] = {"density": point.parameters["density"]}
        recipe["models"][0]["parameters"] = {"weight": point.parameters["b.weight"]}
        out = tmp_path / str(number)
        isomerge.merge_recipe(recipe).save(out)
        loss, accuracy = truth(out)
        assert point.loss == pytest.approx(loss, rel=1e-5) and point.metric == pytest.approx(accuracy)
    lowest = min(got.points, key=lambda point: point.loss or 0.0)
    assert got.best is lowest and got.record["best"]["parameters"] == lowest.parameters
    assert [entry.parameters for entry in got.recipe.models or ()] == [
        {"weight": lowest.parameters["b.weight"], "density": lowest.parameters["density"]},
        {"density": lowest.parameters["density"]},
    ]
    assert len({point.loss for point in got.points}) == 4


def test_models_and_values_under_filters_are_swept_by_their_place(images: Path, tmp_path: Path) -> None:
    t = [{"filter": "attention", "value": 0.5}, {"value": 0.1}]
    recipe: dict[str, Any] = {"merge_method": "slerp", "base_model": str(images / "a"), "parameters": {"t": t}}
    recipe["models"] = [{"model": str(images / "b")}]
    over = {"parameters.t[0].value": [0.2, 0.9], "models[0].model": [str(images / "b"), str(images / "c")]}
    got = isomerge.sweep(recipe, over, data=images / "digits")
    t[0]["value"], recipe["models"][0]["model"] = 0.9, str(images / "c")
    isomerge.merge_recipe(recipe).save(tmp_path / "one")
    assert got.points[3].loss == pytest.approx(truth(tmp_path / "one")[0], rel=1e-5)
    assert len({point.loss for point in got.points}) == 4


def test_the_share_of_two_models_is_their_line(images: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "ab"]}
    got = isomerge.sweep(recipe, {"t": "0:1:0.25"}, data=images / "digits")
    line = isomerge.barrier(images / "a", images / "b", data=images / "digits", points=5)
    assert [point.loss for point in got.points] == pytest.approx([point["loss"] for point in line["points"]], rel=1e-4)
    assert got.points[0].loss == pytest.approx(truth(images / "a")[0], rel=1e-5)
    assert got.points[-1].loss == pytest.approx(truth(images / "b")[0], rel=1e-5)


def test_nothing_is_written_for_a_point(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = everything_in(images)
    recipe = recipe_in(images)
    isomerge.sweep(recipe, {"density": [0.2, 0.5, 0.8]}, data=images / "digits")
    assert everything_in(images) == before and everything_in(tmp_path) == {}
    isomerge.sweep(recipe, {"density": [0.2, 0.5, 0.8]}, data=images / "digits", out=tmp_path / "out")
    assert everything_in(images) == before
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["best.yml", "out", "points.jsonl", "sweep.json", "sweep.svg"]


def test_models_are_aligned_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "isomerge.merging.prepared_models.align_family")
    opened = counted(monkeypatch, "isomerge.merging.plan.models.open_checkpoint")
    recipe = recipe_in(images, align=True)
    over: dict[str, Any] = {"density": [0.2, 0.5], "merge_method": ["ties", "dare_ties"], "seed": [0, 1]}
    assert len(isomerge.sweep(recipe, over, data=images / "digits").points) == 8
    assert len(calls) == 1 and len(opened) == 3


@pytest.mark.slow
def test_what_is_swept_in_align_is_aligned_once_for_each_value(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, "isomerge.merging.prepared_models.align_family")
    recipe = recipe_in(images, align=True)
    over = {"density": [0.2, 0.8], "align.level": ["permutation", "full"]}
    got = isomerge.sweep(recipe, over, data=images / "digits")
    assert len(calls) == 2
    for point in got.points:
        assert list(point.parameters) == ["density", "align.level"]
        written = {**recipe, "align": {"level": point.parameters["align.level"]}}
        written["parameters"] = {"density": point.parameters["density"]}
        isomerge.merge_recipe(written).save(tmp_path / "one", force=True)
        assert point.loss == pytest.approx(truth(tmp_path / "one")[0], rel=1e-5)


def test_statistics_are_measured_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "isomerge.merging.measured_statistics.calibrate")
    models = [{"model": str(images / name)} for name in "ab"]
    data = {"path": str(images / "others"), "limit": 8}
    recipe = {"merge_method": "fisher", "models": models, "data": data}
    got = isomerge.sweep(recipe, {"models[0].weight": [0.5, 1, 4]}, data=images / "digits")
    assert len(calls) == 2
    models[0]["parameters"] = {"weight": 4}  # type: ignore[assignment]
    isomerge.merge_recipe(recipe).save(tmp_path / "one")
    assert got.points[2].loss == pytest.approx(truth(tmp_path / "one")[0], rel=1e-5)


def test_a_whole_model_method_and_repair_are_swept(images: Path, tmp_path: Path) -> None:
    models = [{"model": str(images / name)} for name in "ab"]
    data = {"path": str(images / "others"), "limit": 8}
    recipe = {"merge_method": "regmean", "models": models, "data": data, "repair": True}
    got = isomerge.sweep(recipe, {"t": [0.2, 0.7]}, data=images / "digits")
    models[0]["parameters"], models[1]["parameters"] = {"weight": 0.3}, {"weight": 0.7}  # type: ignore[assignment]
    isomerge.merge_recipe(recipe).save(tmp_path / "one")
    assert got.points[1].loss == pytest.approx(truth(tmp_path / "one")[0], rel=1e-4)
    recipe = {"merge_method": "ot_fusion", "models": [{"model": str(images / name)} for name in "ab"]}
    got = isomerge.sweep(recipe, {"merge_method": ["ot_fusion", "linear"]}, data=images / "digits")
    isomerge.merge_recipe(recipe).save(tmp_path / "two")
    assert got.points[0].loss == pytest.approx(truth(tmp_path / "two")[0], rel=1e-4)


def test_texts_are_read_by_the_merged_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate("ab"):
        llama(tmp_path / name, seed=seed)
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES))
    recipe = {
        "merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in "ab"], "tokenizer_source": "union"
    }  # fmt: skip
    loads = counted(monkeypatch, "isomerge.running.weight_replacement.load_stock")
    data = {"data": {"path": tmp_path / "book.txt", "kind": "documents"}, "batch_size": 4}
    got = isomerge.sweep(recipe, {"t": [0.0, 0.25, 1.0]}, **data)
    assert len(loads) == 1  # the other points are copied into the same module
    recipe["models"][0]["parameters"], recipe["models"][1]["parameters"] = {"weight": 0.75}, {"weight": 0.25}  # type: ignore[index]
    isomerge.merge_recipe(recipe).save(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "one")("\n".join(SENTENCES), return_tensors="pt").input_ids
    assert int(ids.max()) < model.config.vocab_size
    assert got.points[1].loss == pytest.approx(isomerge.evaluate(model=tmp_path / "one", **data)["loss"], rel=1e-5)
    assert got.points[1].metric == pytest.approx(math.exp(got.points[1].loss or 0.0), rel=1e-6)


def test_a_class_that_renames_its_weights_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether names are the same or not, the numbers are those of the written models."""
    for seed, name in enumerate("ab"):
        bert(tmp_path / name, "sequence", ["bad", "good"], seed=seed)
    rows = [{"text": text, "label": "good" if "good" in text else "bad"} for text in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in "ab"]}
    got = isomerge.sweep(recipe, {"t": [0.0, 0.5, 1.0]}, data=tmp_path / "rows.jsonl")
    monkeypatch.setattr(weight_replacement, "_holds_as_stored", lambda *_: False)
    again = isomerge.sweep(recipe, {"t": [0.0, 0.5, 1.0]}, data=tmp_path / "rows.jsonl")
    isomerge.merge([tmp_path / "a", tmp_path / "b"]).save(tmp_path / "half")
    whole = [isomerge.evaluate(tmp_path / n, tmp_path / "rows.jsonl")["loss"] for n in ("a", "half", "b")]
    assert [point.loss for point in got.points] == pytest.approx(whole, rel=1e-6)
    assert [point.loss for point in again.points] == pytest.approx(whole, rel=1e-6)


# --- going on ---------------------------------------------------------------------------------------------------------
def placed(monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda count: None) -> list[Any]:
    """Every model that is measured; `then` may interrupt."""
    calls: list[Any] = []
    original = Bench._put

    def place(self: Any, merged: Any) -> Any:
        calls.append(merged)
        then(len(calls))
        return original(self, merged)

    monkeypatch.setattr(Bench, "_put", place)
    return calls


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(count: int) -> None:
        if count == 3:
            raise KeyboardInterrupt

    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "ab"]}
    whole: dict[str, Any] = {"data": images / "digits", "out": tmp_path / "out"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        placed(patch, interrupt)
        isomerge.sweep(recipe, {"t": "0:1:0.25"}, **whole)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["points.jsonl"]
    with (tmp_path / "out" / "points.jsonl").open("a") as file:
        file.write('{"key": "cut o')  # killed while it wrote
    calls = placed(monkeypatch)
    got = isomerge.sweep(recipe, {"t": "0:1:0.25"}, **whole)
    assert len(calls) == 3 and got.record["kept"] == 2
    fresh = isomerge.sweep(recipe, {"t": "0:1:0.25"}, data=images / "digits")
    assert [p.loss for p in got.points] == [p.loss for p in fresh.points]
    calls.clear()
    finer = isomerge.sweep(recipe, {"t": "0:1:0.125"}, **whole)
    assert len(calls) == 4 and finer.record["kept"] == 5 and finer.record["metric_name"] == "accuracy"
    calls.clear()
    isomerge.sweep(recipe, {"t": "0:1:0.25"}, **whole, limit=10)  # other examples, other numbers
    assert len(calls) == 5
    calls.clear()
    weights = images / "a" / "model.safetensors"
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 10**9))
    isomerge.sweep(recipe, {"t": "0:1:0.25"}, **whole)  # another model under the same name
    assert len(calls) == 5
    calls.clear()
    swapped = {"models[1].model": [str(images / "b"), str(images / "c")]}
    isomerge.sweep(recipe, swapped, **whole)
    weights = images / "c" / "model.safetensors"
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 10**9))
    isomerge.sweep(recipe, swapped, **whole)
    assert len(calls) == 4


def test_the_best_recipe_is_ready_for_merge(images: Path, tmp_path: Path) -> None:
    got = isomerge.sweep(recipe_in(images), {"density": [0.2, 0.6]}, data=images / "digits", out=tmp_path / "out")
    isomerge.merge_recipe(tmp_path / "out" / "best.yml").save(tmp_path / "merged")
    assert truth(tmp_path / "merged")[0] == pytest.approx(got.best.loss, rel=1e-5)
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert record["best"]["loss"] == got.best.loss and len(record["points"]) == 2
    assert (tmp_path / "out" / "sweep.svg").read_text().startswith("<?xml")


def test_a_picture_that_is_asked_for_is_drawn_beside_the_one_of_the_folder(images: Path, tmp_path: Path) -> None:
    got = isomerge.sweep(
        recipe_in(images),
        {"density": [0.2, 0.6]},
        data=images / "digits",
        out=tmp_path / "out",
        plot=tmp_path / "x.svg",
    )
    assert (tmp_path / "x.svg").read_text() == (tmp_path / "out" / "sweep.svg").read_text()
    assert got.record["plot"] == str(tmp_path / "x.svg")


@pytest.mark.parametrize("over", ["density=0.2,0.6", "density=0.2,0.6 b.weight=1,2", "a=1"])
def test_pictures(images: Path, tmp_path: Path, over: str) -> None:
    axes = over.split() if over != "a=1" else ["density=0.2,0.6", "b.weight=1", "merge_method=ties,dare_ties"]
    isomerge.sweep(recipe_in(images), axes, data=images / "digits", plot=tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
def test_a_picture_has_room_for_paths_and_for_many_values(images: Path, tmp_path: Path) -> None:
    from isomerge.sweeping.picture import plot_sweep

    paths = [str(images / "a folder with a long name" / name) for name in "abc"]
    values: list[Any] = [n / 50 for n in range(51)]
    for others in (paths, values):
        points = [{"parameters": {"m": m, "t": t}, "loss": t, "metric": None} for m in others for t in values]
        axes = [{"name": name} for name in "mt"]
        plot_sweep({"parameters": axes, "mode": "grid", "points": points, "best": points[0]}, tmp_path / "map.svg")
        drawn = (tmp_path / "map.svg").read_text()
        assert ("name/c<" in drawn) == (others is paths) and drawn.count("<text") < 50
    single = {"parameters": axes[:1], "mode": "grid", "points": points[:1], "best": points[0], "by": "loss"}
    single["points"] = [{"parameters": {"m": path}, "loss": 1.0, "metric": 0.5} for path in paths]
    plot_sweep({**single, "best": single["points"][0]}, tmp_path / "curve.svg")
    assert "name/c<" in (tmp_path / "curve.svg").read_text()


@pytest.mark.parametrize("line", ['{"loss": 1}', "[1, 2]", '{"key": "x", "loss": 1}', "3"])
def test_a_file_of_points_that_is_none_is_told(images: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "points.jsonl").write_text(f"{line}\n")
    with pytest.raises(CheckpointError, match="line 1 of points.jsonl"):
        isomerge.sweep(recipe_in(images), {"density": [0.2]}, data=images / "digits", out=tmp_path)


# --- test data --------------------------------------------------------------------------------------------------------
def test_the_best_point_is_measured_on_other_data(images: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "ab"]}
    got = isomerge.sweep(recipe, {"t": [0.1, 0.9]}, data=images / "digits", test=images / "others")
    isomerge.merge_recipe(recipe).save(tmp_path / "start")
    isomerge.merge_recipe([got.recipe]).save(tmp_path / "best")
    test = got.record["test"]
    for key in ("start", "best"):
        assert (test[key]["loss"], test[key]["metric"]) == pytest.approx(truth(tmp_path / key, 36), rel=1e-5)
    assert test["examples"] == 36 and not any("chosen on" in note for note in got.record["notes"])
    with pytest.raises(RequestError, match="the same data"):
        isomerge.sweep(recipe, {"t": [0.1]}, data=images / "digits", test=images / "digits")


def test_values_are_chosen_on_the_validation_part_and_tested_on_the_other(images: Path, tmp_path: Path) -> None:
    for part, source in (("validation", "digits"), ("test", "others")):
        (tmp_path / "parts").mkdir(exist_ok=True)
        (tmp_path / "parts" / part).symlink_to(images / source / "test")
    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "ab"]}
    got = isomerge.sweep(recipe, {"t": [0, 1]}, data=tmp_path / "parts", test=tmp_path / "parts")
    assert got.points[0].loss == pytest.approx(truth(images / "a")[0], rel=1e-5)
    assert got.record["examples"] == 24 and got.record["test"]["examples"] == 36


def test_without_a_validation_part_values_are_chosen_on_train_and_never_unasked_on_test(
    images: Path, tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    for part, source in (("train", "digits"), ("test", "others")):
        (tmp_path / "parts" / part).symlink_to(images / source / "test")
    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "ab"]}
    got = isomerge.sweep(recipe, {"t": [0, 1]}, data=tmp_path / "parts", test=tmp_path / "parts")
    assert got.points[0].loss == pytest.approx(truth(images / "a")[0], rel=1e-5)
    assert got.record["examples"] == 24 and got.record["test"]["examples"] == 36
    assert any("using split 'train' (also available: test" in note for note in got.record["notes"])
    asked = isomerge.sweep(recipe, {"t": [0, 1]}, data={"path": tmp_path / "parts", "split": "test"})
    assert asked.record["examples"] == 36


def test_the_best_by_the_metric(images: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / n)} for n in "abc"]}
    over = {"models[0].weight": "0:2:0.5", "models[1].weight": "0:2:1"}
    got = isomerge.sweep(recipe, over, data=images / "digits", by="metric")
    assert got.best.metric == max(point.metric or 0.0 for point in got.points)
    assert got.record["by"] == "metric"
