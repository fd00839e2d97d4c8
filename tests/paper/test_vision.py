"""The image experiments: wiring on tiny models, refusals, dry runs of the original scale."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "paper"))
import figure3
import figure4_images
import merges
import plane
import runner
import table2
import table3
import vision
from results import Mean
from runner import Run

import isomerge

SCRIPTS = {
    "table2": table2, "table3": table3, "figure3": figure3, "figure4_images": figure4_images, "plane": plane,
    "vision": vision,
}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One epoch, little data, for all tests of this file."""
    before = dict(vision.COUNTS)
    vision.COUNTS["reduced"] = vision.Counts(20, 40, 20, 40, 40, 2, 1)
    plane.GRID["reduced"] = 3
    yield tmp_path_factory.mktemp("work")
    vision.COUNTS.update(before)


@pytest.fixture(autouse=True)
def without_fisher_in_table2(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """It takes a second each time; the test of Table 3 merges by the same function."""
    if "table3" not in request.node.name:
        monkeypatch.delitem(merges.METHODS, "Fisher")


def start(name: str, work: Path, *more: str) -> dict[str, Any]:
    script = SCRIPTS[name].script
    argv = ["--scale", "reduced", "--device", "cpu", "--work", str(work), *more]
    runner.main(name, name, "the founding paper", script, argv)
    return json.loads((work / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def values(record: dict[str, Any], table: int, row: str) -> list[list[float]]:
    cells = next(each for each in record["tables"][table]["rows"] if each[0] == row)[1:]
    return [cell["values"] for cell in cells]


def new_run(work: Path, **changes: Any) -> Run:
    given = {"scale": "reduced", "device": "cpu", "seeds": 1, "data": None, "models": None, **changes}
    return Run("table2", work=work, out=work / "results", **given)


@pytest.mark.slow
def test_table2_has_every_row_and_its_plain_average_is_the_plain_average(work: Path) -> None:
    record = start("table2", work)
    rows = [row[0] for row in record["tables"][0]["rows"]]
    assert rows == [*table2.PAPER, table2.SELECTED, *table2.OURS]
    assert len(record["claims"]) == 5
    judged = vision.Vision(new_run(work))
    first, second = (load_file(work / "vits-reduced" / n / "model.safetensors") for n in "01")
    average = {name: (tensor + second[name]) / 2 for name, tensor in first.items()}
    accuracy = 100 * judged.judge([average])["accuracy"]
    assert values(record, 0, "without matching")[0] == [pytest.approx(accuracy)]


@pytest.mark.slow
def test_the_chosen_layer_is_the_best_on_validation_not_on_test(work: Path) -> None:
    record = start("table2", work)
    chosen = record["cells"][f"Simple, {table2.SELECTED} 0-1"]["values"]
    judged = vision.Vision(new_run(work))
    states = []
    for layer in range(2):
        moved = isomerge.align(
            work / "vits-reduced" / "1",
            work / "vits-reduced" / "0",
            level="rotation",
            only="attention",
            layers=str(layer),
        ).state_dict()  # type: ignore[union-attr]
        first = load_file(work / "vits-reduced" / "0" / "model.safetensors")
        states.append({name: (tensor + moved[name]) / 2 for name, tensor in first.items()})
    validated = [judged.judge([state], "validation")["accuracy"] for state in states]
    assert chosen["validations"] == pytest.approx(validated)
    assert chosen["layer"] == int(np.argmax(validated))
    accuracy = 100 * judged.judge([states[chosen["layer"]]])["accuracy"]
    assert values(record, 0, table2.SELECTED)[0] == [pytest.approx(accuracy)]


@pytest.mark.slow
def test_a_second_run_computes_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start("table2", work)

    def refused(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(table2, "measure", refused)
    monkeypatch.setattr(vision.Vision, "images", property(refused))
    again = start("table2", work)
    assert again["tables"] == first["tables"] and again["claims"] == first["claims"]


def test_cells_of_a_pair_in_a_process_of_its_own_are_those_of_the_script(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("table2", work)

    def refused(*_: Any) -> None:
        raise AssertionError("a key of its own")

    monkeypatch.setattr(table2, "measure", refused)
    run = new_run(work)
    table2.measure_pair((run, (0, 1)))
    assert len(run.cells) == len(table2.rows_of(vision.Vision(new_run(work))))


@pytest.mark.slow
def test_figure3_finds_the_cells_of_pairs_in_processes_of_their_own(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()  # as the MPS server leaves it
    shutil.copytree(work / "vits-reduced", tmp_path / "work" / "vits-reduced")
    alone = start("figure3", work)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    measured: list[Any] = []
    whole = figure3.measure_pair
    monkeypatch.setattr(figure3, "measure_pair", lambda job: (measured.append(job[1]), whole(job)))
    assert start("figure3", tmp_path / "work")["tables"] == alone["tables"]
    again = start("figure3", tmp_path / "work")
    assert again["tables"] == alone["tables"] and measured == [(0, 1)], "a second run finds nothing to do"


def test_a_merge_with_kept_statistics_is_that_without(work: Path) -> None:
    seen = vision.Vision(new_run(work))
    models = merges.matched(seen, (0, 1), {"level": "rotation", "only": "attention"})
    for _ in range(2):  # the second time the first model's are known
        kept, fresh = (found["RegMean"](seen, models) for found in (merges.METHODS, merges.TIMED))
        assert all(torch.equal(kept[name], fresh[name]) for name in fresh)
    assert list(seen.statistics) == ["gram of model 0"]


def test_the_distance_of_figure3_is_that_of_numpy_and_matching_never_adds_to_it(work: Path) -> None:
    record = start("figure3", work)
    first, second = (load_file(work / "vits-reduced" / n / "model.safetensors") for n in "01")
    flat = [np.concatenate([state[k].double().numpy().ravel() for k in sorted(first)]) for state in (first, second)]
    before = float(np.linalg.norm(flat[0] - flat[1]))
    assert values(record, 0, figure3.NOTHING)[0] == [pytest.approx(before)]
    for name in (*figure3.PAPERS, "rotation, feed-forwards too", "Git Re-Basin, weight matching", figure3.KEPT):
        assert values(record, 0, name)[0][0] <= before * (1 + 1e-6)
    assert len(record["claims"]) == 4


def test_figure4_of_images_goes_from_the_plain_average_to_that_of_the_matched_models(work: Path) -> None:
    record = start("figure4_images", work)
    losses = record["cells"]["pair 0-1"]["values"]["losses"]
    judged = vision.Vision(new_run(work))
    first, second = (load_file(work / "vits-reduced" / n / "model.safetensors") for n in "01")
    models = [judged.checkpoint(state, name) for name, state in (("second", second), ("first", first))]
    moved = isomerge.align(*models, level="rotation", only="attention").state_dict()
    for other, found in ((second, losses["none"]), (moved, losses["first"]["2"]), (moved, losses["last"]["2"])):
        average = {name: (tensor + other[name]) / 2 for name, tensor in first.items()}
        assert found == pytest.approx(judged.judge([average])["loss"], rel=1e-4)
    assert losses["single"] == {"0": losses["first"]["1"], "1": losses["last"]["1"]}
    assert [claim.split(" (")[0] for claim in record["claims"]] == ["First layers matter most"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_with_finished_nothing_is_trained_and_a_page_with_gaps_is_written(name: str, tmp_path: Path) -> None:
    record = start(name, tmp_path, "--finished")
    assert record["cells"] == {} and not (tmp_path / "vits-reduced").exists()
    assert (tmp_path / "results" / f"{name}.md").exists() and any("Not finished" in note for note in record["notes"])


@pytest.mark.slow
def test_table3_gives_shares_of_its_own_seconds(work: Path) -> None:
    record = start("table3", work)
    match, fisher = (values(record, 0, name)[0][0] for name in (table3.PAPERS, "Fisher"))
    assert values(record, 1, table3.PAPERS)[0] == [pytest.approx(100 * match / fisher)]
    training = [json.loads((work / "vits-reduced" / n / "training.json").read_text())["seconds"] for n in "01"]
    assert values(record, 0, "training, per model")[0] == pytest.approx(training)


@pytest.mark.slow
def test_the_marked_merges_of_the_plane_lie_between_and_have_the_loss_of_the_average(work: Path) -> None:
    record = start("plane", work)
    marks = record["cells"]["plane, full"]["values"]["marks"]
    a, b, merged = marks["A"], marks["B"], marks["merge of A and B"]
    assert merged["x"] == pytest.approx((a["x"] + b["x"]) / 2)
    judged = vision.Vision(new_run(work))
    first, second = (load_file(work / "vits-reduced" / n / "model.safetensors") for n in "01")
    average = {name: (tensor + second[name]) / 2 for name, tensor in first.items()}
    assert merged["loss"] == pytest.approx(judged.judge([average])["loss"], rel=1e-4)
    assert marks["B aligned"]["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_the_noise_of_a_gain_is_at_least_that_of_counting_images() -> None:
    gain, noise = table2.difference(Mean([60.0]), Mean([50.0]), images=100)
    assert gain == 10.0
    assert noise == pytest.approx(100 * np.sqrt(2 * 0.55 * 0.45 / 100))
    assert table2.difference(Mean([60.0, 70.0]), Mean([60.0, 40.0]), images=10**6)[1] == pytest.approx(15.0)
    assert table2.difference(Mean([60.0]), Mean([55.0, 10.0]), images=10**6)[0] == 5.0


# --- what is missing --------------------------------------------------------------------------------------------------
def test_missing_data_are_refused_with_what_to_put_where(tmp_path: Path) -> None:
    for data in (None, tmp_path):
        with pytest.raises(SystemExit, match=r"cifar10-jpeg\.tar\.xz, or a folder cifar10/ .* with --data"):
            vision.Vision(new_run(tmp_path, scale="small", data=data))


def test_missing_original_models_are_refused_with_where_to_find_them(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="transformer-fusion .* vits/0 and vits/1, .* --models"):
        vision.Vision(new_run(tmp_path, scale="original"))


def test_given_models_must_be_as_many_as_seeds(tmp_path: Path) -> None:
    (tmp_path / "vits").mkdir()
    with pytest.raises(SystemExit, match="no model in .*vits/0"):
        vision.Vision(new_run(tmp_path, scale="small", models=tmp_path))


def tiny_vit(folder: Path, **shape: Any) -> None:
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                    patch_size=4, **shape)  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)


def test_given_models_for_other_images_are_refused_with_what_they_take(tmp_path: Path) -> None:
    for number in range(2):
        tiny_vit(tmp_path / "vits" / str(number), image_size=64)
    with pytest.raises(SystemExit, match=r"vits/0 does not fit CIFAR-10, .* 32 × 32 .* has image_size 64"):
        vision.Vision(new_run(tmp_path, scale="small", models=tmp_path))
    (tmp_path / "vits" / "0" / "config.json").unlink()
    with pytest.raises(SystemExit, match="has image_size not named"):
        vision.Vision(new_run(tmp_path, scale="small", models=tmp_path))
    for number in range(2):
        tiny_vit(tmp_path / "vits" / str(number), image_size=[32, 32])
    assert not vision.Vision(new_run(tmp_path, scale="small", models=tmp_path)).trained_here


def test_the_reduced_form_trains_its_own_models_beside_those_that_are_given(work: Path, tmp_path: Path) -> None:
    """As where `make paper MODELS=…` meets a machine without a GPU."""
    for number in range(2):
        tiny_vit(tmp_path / "vits" / str(number), image_size=32)
    record = start("vision", work, "--models", str(tmp_path))
    assert any("left alone" in note for note in record["notes"])
    assert {folder.name for folder in (work / "vits-reduced").iterdir()} >= {"0", "1"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_of_the_original_scale_says_what_it_would_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--scale", "original", "--dry-run", "--device", "cpu", "--work", str(tmp_path / "work")]
    runner.main(name, name, "the founding paper", SCRIPTS[name].script, argv)
    said = capsys.readouterr().out
    assert "would need: the two models of Imfeld" in said and "uoft-cs/cifar10" in said
    assert "would compute: " in said
    assert not (tmp_path / "work").exists()


def test_a_dry_run_of_the_small_scale_says_what_it_would_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--scale", "small", "--dry-run", "--device", "cpu", "--work", str(tmp_path / "work")]
    runner.main("table2", "", "", table2.script, argv)
    said = capsys.readouterr().out
    assert said.count("would train: ") == 3 and "60 epochs, seed 2" in said
    assert f"would compute: Simple, {table2.SELECTED} 1-2" in said
    assert f"would compute: OT, {table2.SELECTED} 0-1" in said and f"OT, {table2.SELECTED} 1-2" not in said


def test_the_original_scale_reads_the_hub_data_set_and_the_given_models(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of six pictures and two tiny models stand in for the real ones."""
    picture = Image.fromarray(np.full((32, 32, 3), 200, np.uint8))

    class Rows(list[dict[str, Any]]):
        features = types.SimpleNamespace  # set below

    rows = Rows({"img": picture, "label": n % 2} for n in range(6))
    rows.features = {"label": types.SimpleNamespace(names=["airplane", "automobile"])}  # type: ignore[assignment]
    asked = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda name: asked.append(name) or {"train": rows, "test": rows}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)

    from dataclasses import replace

    import vit_cifar10

    plan = replace(vit_cifar10.TINY, shape={**vit_cifar10.TINY.shape, "num_labels": 2})
    for number in range(2):
        torch.manual_seed(number)
        model = vit_cifar10.new_model(plan)
        model.config.id2label = {0: "airplane", 1: "automobile"}
        model.config.label2id = {"airplane": 0, "automobile": 1}
        vit_cifar10.save(tmp_path / "models" / "vits" / str(number), model, {})
    (tmp_path / "work").mkdir()
    run = new_run(tmp_path / "work", scale="original", models=tmp_path / "models")
    found = vision.Vision(run)
    assert len(found.images["train"][1]) == 6 and found.images["train"][1].bincount().tolist() == [3, 3]
    assert asked == ["uoft-cs/cifar10"]
    white = (200 / 255 - np.array(vit_cifar10.MEAN)) / np.array(vit_cifar10.STD)
    assert found.images["train"][0][0, :, 0, 0].numpy() == pytest.approx(white, abs=2e-3)
    assert 0 <= found.judge([found.state(0)])["accuracy"] <= 1
