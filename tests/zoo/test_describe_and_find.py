"""Descriptions beside models, and models found by them: what is written, refused, and ranked first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.zoo.answers import answers_of
from isomerge.zoo.description import NAME, read_description
from isomerge.zoo.features import features_of
from models import bert, fingerprint, image_pair, vit
from samples import digits

WEATHER = ["rain falls on the hill", "the wind and the rain", "snow falls and the wind is cold", "cold rain all day"]
FOOD = ["bread and butter", "soup with bread", "a cake with butter and cream", "warm soup and a cake"]


def table(path: Path, texts: list[str], label: str, repeat: int = 12) -> Path:
    """Sentences in varied order, with a label each; nothing is twice the same."""
    rows = [f"{label},{texts[n % len(texts)]} {texts[(3 * n + 1) % len(texts)]} {n}" for n in range(repeat)]
    path.write_text("\n".join(["label,text", *rows]) + "\n")
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return Path(shutil.copytree(image_pair()[0], tmp_path / "a"))


def test_a_description_is_beside_the_model_and_changes_nothing_else(a: Path) -> None:
    before = fingerprint(a)
    described = isomerge.describe(a, digits(), points=6)
    content = json.loads((a / NAME).read_text())
    assert {key: value for key, value in fingerprint(a).items() if key != NAME} == before
    assert Path(described.file) == a / NAME
    assert described.points == len(content["points"]) <= 6 and len(content["points"][0]) == 32
    assert (content["task"], content["examples"], content["features"]) == ("image", 90, "image-1")
    assert content["parameters"] == sum(t.numel() for t in load(a).parameters())
    assert content["metric"] == isomerge.evaluate(a, digits()).metric
    assert str(digits()) not in (a / NAME).read_text(), "where the data is stays out of it"


def load(folder: Path) -> Any:
    return transformers.AutoModelForImageClassification.from_pretrained(folder)


def test_the_features_are_in_the_order_in_which_models_see_the_examples() -> None:
    """Otherwise labels would go with the answers to other examples."""
    data = open_data(digits())
    checkpoint = open_checkpoint(image_pair()[0])
    for limit in (None, 40):
        _, rows, names = features_of(data, limit, 3, default=1000)
        batches = list(data.batches(checkpoint, limit=limit, seed=3, labels=True))
        labels = torch.cat([batch["labels"] for batch in batches])
        pixels = torch.cat([batch["pixel_values"] for batch in batches]).mean((1, 2, 3))
        assert len({(name, int(number)) for name, number in zip(names, labels, strict=True)}) == len(set(names))
        grey = [np.mean(np.asarray(one.value)) for one in data.contents(limit, 3)]
        assert np.corrcoef(grey, pixels.numpy())[0, 1] > 0.999 and len(rows) == len(labels)


def test_answers_are_those_of_the_stock_class() -> None:
    folder, data = image_pair()[0], open_data(digits())
    answers = answers_of(open_checkpoint(folder), data, 30, 0, "cpu")
    (batch,) = data.batches(open_checkpoint(folder), limit=30, batch_size=64)
    module = load(Path(folder)).eval()
    with torch.no_grad():
        out = module(**batch)
    assert np.allclose(answers.probabilities, out.logits.double().softmax(-1).numpy(), atol=1e-6)
    assert answers.features is not None
    again = answers.features @ module.classifier.weight.detach().double().numpy().T
    assert np.allclose(again + module.classifier.bias.detach().double().numpy(), out.logits.numpy(), atol=1e-5)


def test_the_model_whose_data_is_like_the_query_is_first(tmp_path: Path) -> None:
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    for name, texts in (("a-food", FOOD), ("b-weather", WEATHER)):
        bert(zoo / name, "sequence", labels=["x", "y"], seed=0)
        isomerge.describe(zoo / name, table(tmp_path / f"{name}.csv", texts, "x"), score=False)
    for query, first in ((WEATHER, "b-weather"), (FOOD, "a-food")):
        asked = table(tmp_path / "query.csv", query[::-1], "?", repeat=10)
        found = isomerge.find(asked, zoo)
        assert found.by == "distance" and not found.labelled
        assert Path(found.models[0].name).name == first
        near, far = (one.distance for one in found.models)
        assert near is not None and far is not None and near < 0.9 * far
        assert [Path(one).name for one in found.best(1)] == [first]
    loose = tmp_path / "loose"
    loose.mkdir()
    for folder in zoo.iterdir():
        shutil.copy(folder / NAME, loose / f"{folder.name}.json")
    alone = isomerge.find(asked, loose)
    assert [one.distance for one in alone.models] == [near, far] and alone.models[0].model is None
    (loose / "notes.json").write_text('{"by": "somebody"}')
    assert len(isomerge.find(asked, loose).models) == 2, "other files are left alone"
    (loose / "cut.json").write_text('{"format": 1, "feat')
    with pytest.raises(isomerge.IsomergeError, match="cut.json"):
        isomerge.find(asked, loose)
    with pytest.raises(isomerge.RequestError, match="weights of 0 are at hand"):
        alone.best(1)


def test_labels_decide_where_there_are_some(tmp_path: Path) -> None:
    """One model is a copy whose head answers at random places: less of the labels is in what it says."""
    query = digits()
    vit(tmp_path / "a", ["zero", "one", "two"], seed=1)
    found = isomerge.find(query, [tmp_path / "a", image_pair()[0]], by="logme")
    assert found.by == "logme" and found.labelled
    scores = [one.logme for one in found.models]
    assert None not in scores and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    covered = {Path(one.name).name: one.covered for one in found.models}
    assert isomerge.find(query, image_pair()).by == "leep"
    assert 0 <= covered["a"] <= 1


@pytest.mark.parametrize(
    ("call", "said", "key"),
    [
        (lambda a, t: isomerge.describe(a, digits(), points=60), "points at most", "points"),
        (lambda a, t: isomerge.describe(a, digits(), limit=5), "show single examples", "points"),
        (lambda a, t: isomerge.describe(a, digits(), limit=0), "at least one is needed", "limit"),
        (lambda a, t: isomerge.describe(a, digits(), out=t / "no" / "x.json"), "there is no folder", "out"),
        (lambda a, t: isomerge.describe(load(a), digits()), "it is no folder", "out"),
        (lambda a, t: isomerge.describe(a, None), "needs the data", "data"),
        (lambda a, t: isomerge.find(None, [a]), "needs a query", "query"),
        (lambda a, t: isomerge.find(digits(), []), "models must be a list", "models"),
        (lambda a, t: isomerge.find(digits(), [a], by="distance"), "no model has that number", "by"),
        (lambda a, t: isomerge.find(digits(), [a], by="liip"), "leep", "by"),
        (lambda a, t: isomerge.find(digits(), t / "empty"), "holds no model", "models"),
        (lambda a, t: isomerge.find([{"pixel_values": torch.zeros(2, 1, 8, 8)}], [a]), "made for one", "data"),
    ],
)
def test_what_cannot_be_done_is_refused(a: Path, tmp_path: Path, call: Any, said: str, key: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(isomerge.RequestError, match=said) as refused:
        call(a, tmp_path)
    assert key in refused.value.keys
    assert not (a / NAME).exists()


def test_a_file_that_is_there_stays_unless_forced(a: Path) -> None:
    isomerge.describe(a, digits(), score=False, points=2)
    first = (a / NAME).read_bytes()
    with pytest.raises(isomerge.RequestError, match="exists"):
        isomerge.describe(a, digits(), score=False, points=3)
    assert (a / NAME).read_bytes() == first
    isomerge.describe(a, digits(), score=False, points=3, force=True)
    assert (a / NAME).read_bytes() != first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"points": [[0.0] * 31]}, "has 32 numbers"),
        ({"weights": [1.0]}, "points and 1 weights"),
        ({"features": "image-9"}, "image-9"),
        ({"format": 2}, "format"),
        ({"examples": 0}, "examples"),
        ({"secret": 1}, "secret"),
    ],
)
def test_a_damaged_description_names_the_fault(a: Path, change: dict[str, Any], said: str) -> None:
    isomerge.describe(a, digits(), score=False, points=3)
    content = json.loads((a / NAME).read_text())
    (a / NAME).write_text(json.dumps(content | change))
    with pytest.raises(isomerge.IsomergeError, match=said):
        read_description(a / NAME)
    (a / NAME).write_text(json.dumps(content)[:-40])
    with pytest.raises(isomerge.IsomergeError, match="Describe the model again"):
        isomerge.find(digits(), [a])


def test_data_that_repeats_itself_is_told(tmp_path: Path, a: Path) -> None:
    same = tmp_path / "same.csv"
    same.write_text("text\n" + "one and the same line\n" * 40)
    described = isomerge.describe(a, same, score=False)
    assert any("as good as an example" in note for note in described.notes)
    assert not isomerge.describe(a, digits(), score=False, force=True).notes
