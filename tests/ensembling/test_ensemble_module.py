"""An ensemble as one object: forward, predictions, its manifest, and what is fitted on held-out data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, AutoTokenizer

import isomerge
from ensembling.test_combinations import scipys_stack
from isomerge.errors import CheckpointError, NotFoundError, RequestError
from models import bert, gpt2_classifier, model
from samples import SENTENCES, digits, write_digits

PIXELS = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
LABELS = ["bad", "good"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab"):
        shutil.copytree(model("vit", seed, torch.float32), tmp_path / name)
    return tmp_path


def logits(folder: Path, pixels: torch.Tensor = PIXELS) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForImageClassification.from_pretrained(folder).eval()(pixels).logits


def test_forward_is_that_of_the_stock_class(folder: Path) -> None:
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    output = isomerge.make_ensemble([folder / "a", folder / "b"])(pixel_values=PIXELS, labels=labels)
    expected = (logits(folder / "a").softmax(-1) + logits(folder / "b").softmax(-1)) / 2
    assert type(output).__name__ == "ImageClassifierOutput"
    assert torch.allclose(output.logits.softmax(-1), expected, atol=1e-6)
    assert float(output.loss) == pytest.approx(float(F.nll_loss(expected.log(), labels)), rel=1e-5)


def test_predictions_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        bert(tmp_path / name, "sequence", LABELS, seed=seed)
    gpt2_classifier(tmp_path / "g", LABELS)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))
    both = isomerge.make_ensemble([tmp_path / "a", tmp_path / "g"], "logit")
    found = both.predict(tmp_path / "rows.jsonl", batch_size=1)
    expected = []
    for name in "ag":
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        with torch.no_grad():
            expected.append(torch.cat([stock(**tokenizer(text, return_tensors="pt")).logits for text in SENTENCES]))
    chances = (sum(expected) / 2).softmax(-1)
    assert torch.allclose(torch.tensor(found.probabilities), chances, atol=1e-5)
    assert found.predicted == [LABELS[number] for number in chances.argmax(-1)] and found.labels == LABELS
    with pytest.raises(RequestError, match="no one batch is for all of them"):
        both(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("combination", ["probability", "logit", "vote"])
def test_labels_that_may_all_hold_are_combined_one_by_one(tmp_path: Path, combination: str) -> None:
    kinds = ["old", "new", "long"]
    for seed, name in enumerate("abc"):
        bert(tmp_path / name, "sequence", kinds, seed=seed, problem_type="multi_label_classification")
    rows = [{"text": t, "old": int("the" in t), "new": int("a" in t), "long": int(len(t) > 20)} for t in SENTENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": tmp_path / "rows.jsonl", "label": "old,new,long"}
    found = isomerge.ensemble([tmp_path / name for name in "abc"], data, combination=combination)
    said = []
    for name in "abc":
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        with torch.no_grad():
            said.append(torch.cat([stock(**tokenizer(t, return_tensors="pt")).logits for t in SENTENCES]).double())
    z = torch.stack(said)
    chances = {
        "probability": z.sigmoid().mean(0),
        "logit": z.mean(0).sigmoid(),
        "vote": ((z > 0).double().sum(0) + z.sigmoid().mean(0)) / 4,
    }[combination]
    right = torch.tensor([[row[kind] for kind in kinds] for row in rows], dtype=torch.float64)
    assert found["ensemble"]["loss"] == pytest.approx(float(F.binary_cross_entropy(chances, right)), rel=1e-4)
    assert found["ensemble"]["metrics"]["exact"] == pytest.approx(
        float(((chances > 0.5) == right).all(1).double().mean())
    )


# --- the manifest -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("combination", ["probability", "logit", "vote", "weighted", "stacked"])
def test_what_was_saved_gives_the_same_logits(folder: Path, combination: str) -> None:
    held_out = digits(100, 60) if combination in ("weighted", "stacked") else None
    made = isomerge.make_ensemble([folder / "a", folder / "b"], combination, held_out=held_out)
    expected = made(pixel_values=PIXELS).logits
    assert made.save(folder / "kept") == folder / "kept" / "ensemble.json"
    shutil.copytree(folder, folder.parent / f"moved-{folder.name}")
    for place in (folder, folder.parent / f"moved-{folder.name}"):
        again = isomerge.load_ensemble(place / "kept", check=True)
        assert torch.equal(again(pixel_values=PIXELS).logits, expected)
    manifest = json.loads((folder / "kept" / "ensemble.json").read_text())
    assert [one["model"] for one in manifest["members"]] == ["../a", "../b"]
    assert ("fitted_on" in manifest) is (held_out is not None)


def test_a_manifest_that_cannot_be_used_says_why(folder: Path) -> None:
    made = isomerge.make_ensemble([folder / "a", folder / "b"])
    file = made.save(folder / "ens.json")
    with pytest.raises(RequestError, match="exists"):
        made.save(file)
    made.save(file, force=True)
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "weights": [0.5]}))
    with pytest.raises(CheckpointError, match="2 members and 1 weights"):
        isomerge.load_ensemble(file)
    file.write_text(json.dumps({**record, "extra": 1}))
    with pytest.raises(CheckpointError, match="extra"):
        isomerge.load_ensemble(file)
    for changes, said in (
        ({"combination": "stacked"}, "'stacked' has no stack"),
        ({"stack": {"matrix": [[1.0]], "bias": [0.0]}}, "which it does not use"),
        ({"combination": "stacked", "stack": {"matrix": [[1.0]], "bias": [0.0]}}, "not a matrix of 5 × 10"),
        ({"members": [{**record["members"][0], "model": "a\0"}] * 2}, "no file can be called so"),
    ):
        file.write_text(json.dumps({**record, **changes}))
        with pytest.raises((CheckpointError, NotFoundError), match=said):
            isomerge.load_ensemble(file)
    file.write_text(json.dumps(record))
    shutil.rmtree(folder / "b")
    with pytest.raises(NotFoundError, match=r"member b is not there"):
        isomerge.load_ensemble(file)
    shutil.copytree(model("vit", 2, torch.float32), folder / "b")
    isomerge.load_ensemble(file)
    with pytest.raises(CheckpointError, match="weights of b are not those"):
        isomerge.load_ensemble(file, check=True)
    with pytest.raises(NotFoundError, match="no such file"):
        isomerge.load_ensemble(folder / "gone.json")
    module = AutoModelForImageClassification.from_pretrained(folder / "a")
    with pytest.raises(RequestError, match="in memory"):
        isomerge.make_ensemble([module, folder / "a"]).save(folder / "other.json")


def test_a_saved_ensemble_is_measured_like_its_members(folder: Path) -> None:
    options: dict[str, Any] = {"combination": "logit", "weights": [1, 3]}
    named = isomerge.ensemble(
        [folder / "a", folder / "b"], {"path": digits(), "limit": 20}, save=folder / "ens.json", **options
    )
    assert named.saved == str(folder / "ens.json") and named.weights == [0.25, 0.75]
    again = isomerge.ensemble([folder / "ens.json"], {"path": digits(), "limit": 20})
    assert again.ensemble == named.ensemble and again.combination == "logit" and "saved" not in again
    with pytest.raises(RequestError, match="made already"):
        isomerge.ensemble([folder / "ens.json"], digits(), combination="vote")


# --- what is fitted ---------------------------------------------------------------------------------------------------
def pixels_of(first: int, count: int) -> tuple[torch.Tensor, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = (images[first : first + count].reshape(-1, 1, 8, 8) * 15).astype("uint8") / 255
    return torch.tensor((chosen - 0.5) / 0.5, dtype=torch.float32).expand(-1, 3, -1, -1), labels[
        first : first + count
    ] % 5


def test_a_stack_is_scipys_optimum_on_the_held_out_predictions(folder: Path) -> None:
    held_out = digits(100, 200)
    found = isomerge.ensemble(
        [folder / "a", folder / "b"], digits(300, 100), combination="stacked", held_out=held_out, ridge=0.05
    )

    def features(pixels: torch.Tensor) -> np.ndarray:
        return torch.cat([logits(folder / name, pixels).log_softmax(-1) for name in "ab"], 1).double().numpy()

    pixels, labels = pixels_of(100, 200)
    table = scipys_stack(features(pixels), labels, 0.05)
    pixels, labels = pixels_of(300, 100)
    scores = torch.from_numpy(features(pixels) @ table[:, :-1].T + table[:, -1])
    right = torch.from_numpy(labels)
    assert found["ensemble"]["metric"] == pytest.approx(float((scores.argmax(1) == right).double().mean()))
    assert found["ensemble"]["loss"] == pytest.approx(float(F.cross_entropy(scores, right)), rel=1e-4)


def test_nothing_is_fitted_on_what_is_measured(folder: Path) -> None:
    models = [folder / "a", folder / "b"]
    with pytest.raises(RequestError, match="fitted on the same data"):
        isomerge.ensemble(models, digits(), combination="weighted", held_out=digits())
    with pytest.raises(RequestError, match="no part called validation"):
        isomerge.ensemble(models, digits(), combination="stacked")
    write_digits(folder / "images")
    with pytest.raises(RequestError, match="part called test"):
        isomerge.make_ensemble(models, "weighted", held_out={"path": folder / "images", "split": "test"})
    with pytest.raises(RequestError, match="Pass held_out"):
        isomerge.make_ensemble(models, "weighted")
    with pytest.raises(RequestError, match="learns nothing"):
        isomerge.make_ensemble(models, "logit", held_out=digits())


def test_without_held_out_data_the_validation_part_is_used(folder: Path) -> None:
    for part, first in (("validation", 100), ("test", 300)):
        shutil.copytree(digits(first, 60), folder / "images" / part)
    models = [folder / "a", folder / "b"]
    found = isomerge.ensemble(models, folder / "images", combination="weighted")
    named = isomerge.ensemble(models, digits(300, 60), combination="weighted", held_out=digits(100, 60))
    assert found.weights == pytest.approx(named.weights, abs=1e-9) and found.weights[0] != pytest.approx(0.5, abs=0.01)
    assert found["ensemble"]["loss"] == pytest.approx(named["ensemble"]["loss"], rel=1e-6)


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], ["x", 1]])
def test_weights_that_mean_nothing_are_refused(folder: Path, weights: Any) -> None:
    with pytest.raises(RequestError, match="each needs one number"):
        isomerge.make_ensemble([folder / "a", folder / "b"], weights=weights)
    with pytest.raises(RequestError, match="has no weights"):
        isomerge.make_ensemble([folder / "a", folder / "b"], "vote", weights=[1, 2])


def test_numbers_have_a_mean_and_no_more(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        bert(tmp_path / name, "sequence", ["score"], seed=seed)
    models = [tmp_path / "a", tmp_path / "b"]
    ids = torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():
        own = [float(AutoModelForSequenceClassification.from_pretrained(m).eval()(ids).logits) for m in models]
    assert float(isomerge.make_ensemble(models, weights=[3, 1])(input_ids=ids).logits) == pytest.approx(
        0.75 * own[0] + 0.25 * own[1], rel=1e-5
    )
    for combination in ("logit", "vote", "weighted", "stacked"):
        with pytest.raises(RequestError, match="predict numbers"):
            isomerge.make_ensemble(models, combination)


# --- snapshots --------------------------------------------------------------------------------------------------------
def test_a_training_run_stands_for_its_snapshots(tmp_path: Path) -> None:
    for seed, step in enumerate((100, 20, 3)):
        shutil.copytree(model("vit", seed, torch.float32), tmp_path / "run" / f"checkpoint-{step}")

    def names(**options: Any) -> list[str]:
        made = isomerge.make_ensemble([tmp_path / "run"], **options)
        return [Path(one.checkpoint.name).name for one in made.stock]

    assert names() == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert names(snapshots=2) == ["checkpoint-20", "checkpoint-100"]
    shutil.copytree(model("vit", 3, torch.float32), tmp_path / "run", dirs_exist_ok=True)
    assert names() == ["run"], "a folder that is a model is one"
    assert names(snapshots=5) == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    found = isomerge.ensemble([tmp_path / "run"], {"path": digits(), "limit": 10}, snapshots=3)
    assert len(found.models) == 3 and any("snapshot" in note for note in found.notes)
    with pytest.raises(RequestError, match="at least 1"):
        names(snapshots=0)
    with pytest.raises(RequestError, match="none of the models is a folder with"):
        isomerge.make_ensemble([tmp_path / "run" / "checkpoint-3"], snapshots=2)


def test_modules_are_given_back_as_they_were(folder: Path) -> None:
    module = AutoModelForImageClassification.from_pretrained(folder / "a").train()
    isomerge.ensemble([module, folder / "b"], {"path": digits(), "limit": 10})
    assert module.training
