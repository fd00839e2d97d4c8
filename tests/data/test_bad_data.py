"""Bad data and bad models, through every verb that runs models on data: each says what is wrong and where."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from isomerge import align, merge
from isomerge.calibration import calibrate, cross_statistics
from isomerge.connectivity.barrier import barrier
from isomerge.connectivity.curve import curve
from isomerge.data import open_data
from isomerge.data.images import Pixels
from isomerge.errors import IsomergeError, RequestError
from isomerge.evaluation.evaluate import evaluate
from models import bert, vit
from samples import SENTENCES, write_digits

DIGITS = ["zero", "one", "two"]
Verb = Callable[[Path, Path, Any], Any]

VERBS: dict[str, Verb] = {
    "evaluate": lambda a, b, data: evaluate(b, data),
    "calibrate": lambda a, b, data: calibrate(b, open_data(data)),
    "fisher": lambda a, b, data: calibrate(b, open_data(data), what={"fisher"}, fisher="empirical"),
    "align": lambda a, b, data: align(b, a, data=data),
    "cross": lambda a, b, data: cross_statistics(b, a, open_data(data)),
    "reconstruct": lambda a, b, data: merge([a, b], method="reconstruct", data=data),
    "barrier": lambda a, b, data: barrier(a, b, data=data, points=3, align=False),
    "curve": lambda a, b, data: curve(a, b, data=data, points=3, steps=1),
}
LABELLED = ("evaluate", "fisher", "barrier", "curve")
each_verb = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    vit(tmp_path / "a", DIGITS, seed=0)
    vit(tmp_path / "b", DIGITS, seed=1)
    return tmp_path / "a", tmp_path / "b"


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def picture() -> bytes:
    content = io.BytesIO()
    Image.new("L", (8, 8), 7).save(content, "PNG")
    return content.getvalue()


@each_verb
def test_a_damaged_picture_in_an_archive_is_named(verb: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": picture() for name in DIGITS for n in range(2)} | {"one/broken.png": picture()[:30]}
    with pytest.raises(RequestError, match=r"digits\.zip.*one/broken\.png"):
        VERBS[verb](*models, archive(tmp_path / "digits.zip", files))


@each_verb
def test_data_without_an_example_is_refused(verb: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty" / "one").mkdir(parents=True)
    with pytest.raises(RequestError, match="empty.*(holds neither|not one)"):
        VERBS[verb](*models, tmp_path / "empty")


@pytest.mark.parametrize("verb", LABELLED)
def test_labels_that_are_missing_are_asked_for(verb: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    bare = archive(tmp_path / "bare.zip", {f"{n}.png": picture() for n in range(4)})
    with pytest.raises(RequestError, match="no labels"):
        VERBS[verb](*models, bare)


@pytest.mark.parametrize("verb", sorted(set(VERBS) - set(LABELLED)))
def test_labels_are_not_needed_where_nothing_reads_them(verb: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    bare = archive(tmp_path / "bare.zip", {f"{n}.png": picture() for n in range(4)})
    assert VERBS[verb](*models, bare) is not None


@pytest.mark.parametrize("verb", LABELLED)
def test_classes_the_model_does_not_have_are_listed(verb: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    files = {f"{name}/{n}.png": picture() for name in ("cat", "dog") for n in range(2)}
    with pytest.raises(RequestError, match="no 'cat', 'dog'.*the model has 'zero', 'one', 'two'"):
        VERBS[verb](*models, archive(tmp_path / "pets.zip", files))


def test_one_class_only_is_told(models: tuple[Path, Path], tmp_path: Path) -> None:
    data = archive(tmp_path / "one.zip", {f"train/one/{n}.png": picture() for n in range(4)})
    assert any("one class only, 'one'" in note for note in evaluate(models[0], data)["notes"])
    assert any("one class only, 'one'" in note for note in barrier(*models, data=data, points=3, align=False)["notes"])
    opened = open_data(data)
    measured = calibrate(models[0], opened, what={"fisher"}, fisher="empirical")
    assert any("one class only, 'one'" in note for note in measured.info["notes"])


def broken(folder: Path, value: float) -> None:
    """One number of the first layer's key weights."""
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in sorted(weights) if n.endswith("key.weight") or n.endswith("k_proj.weight"))
    weights[name][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@each_verb
def test_weights_that_are_no_numbers_are_told_with_the_model(
    verb: str, value: float, models: tuple[Path, Path], tmp_path: Path
) -> None:
    write_digits(tmp_path / "digits", 12)
    broken(models[1], value)
    with pytest.raises(IsomergeError) as told:
        VERBS[verb](*models, tmp_path / "digits")
    assert str(models[1]) in str(told.value)
    assert verb in ("align", "reconstruct") or "key.weight" in str(told.value)


@pytest.mark.parametrize("verb", ["calibrate", "cross"])
def test_activations_that_overflow_are_told_with_model_layer_and_batch(
    verb: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    write_digits(tmp_path / "digits", 12)
    weights = load_file(models[1] / "model.safetensors")
    name = next(n for n in sorted(weights) if "intermediate" in n and n.endswith(".weight"))
    weights[name].fill_(3e38)
    save_file(weights, models[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IsomergeError, match=r"/b\b.*batch 1.*layer.0.(intermediate|output).dense"):
        VERBS[verb](*models, tmp_path / "digits")


def test_texts_longer_than_the_model_are_cut_and_counted_in_every_record(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        bert(tmp_path / name, "sequence", ["x", "y"], seed=number)
    rows = [*(f"{text}\tx" for text in SENTENCES), " ".join(SENTENCES * 9) + "\ty"]
    (tmp_path / "long.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    a, b, data = tmp_path / "a", tmp_path / "b", tmp_path / "long.tsv"
    records = {
        "evaluate": evaluate(a, data)["notes"],
        "calibrate": calibrate(a, open_data(data)).info["notes"],
        "cross": cross_statistics(b, a, open_data(data)).notes,
        "barrier": barrier(a, b, data=data, points=3, align=False)["notes"],
    }
    for verb, notes in records.items():
        assert any("1 of 13 examples are longer than" in note for note in notes), verb


def test_ready_tokens_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    bert(tmp_path / "a", "sequence", ["x", "y"])
    positions = json.loads((tmp_path / "a" / "config.json").read_text())["max_position_embeddings"]
    batch = {"input_ids": torch.ones(2, positions + 1, dtype=torch.long)}
    for what in ({"gram"}, {"fisher"}):
        with pytest.raises(RequestError, match=f"{positions + 1} tokens.*takes {positions}"):
            calibrate(tmp_path / "a", lambda: iter([batch]), what=what)


def test_an_encoding_that_cannot_be_read_is_told_with_file_and_place(tmp_path: Path) -> None:
    for name in ("a.txt", "a.tsv", "a.csv", "a.jsonl", "a.conll"):
        (tmp_path / name).write_bytes(b"text\tlabel\ncaf\xe9 au lait\tx\n")
        with pytest.raises(RequestError, match=rf"{name}.*not UTF-8"):
            open_data(tmp_path / name)


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    bert(tmp_path / "a", "sequence", ["x", "y"])
    (tmp_path / "a.csv").write_text("sentence,verdict\nthe cat,x\na dog,y\n")
    with pytest.raises(RequestError, match="'lable' is not a column of it. It has 'sentence', 'verdict'"):
        evaluate(tmp_path / "a", {"path": tmp_path / "a.csv", "label": "lable"})


def test_a_file_of_another_kind_beside_texts_makes_them_no_model(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "lines.txt").write_text("one two\nthree four\n")
    (folder / "cache.pt").write_bytes(b"")
    assert "lines.txt" in open_data(folder, kind="lines").name
    (folder / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="this is a model, and not data"):
        open_data(folder, kind="lines")


def _riff(kind: bytes, start: bytes) -> bytes:
    return b"RIFF" + bytes(4) + b"WEBP" + kind + bytes(4) + start.ljust(10, b"\0") + bytes(16)


@pytest.mark.parametrize(
    "content",
    [
        _riff(b"VP8 ", bytes(6) + b"\xff\xff\xff\xff"),
        _riff(b"VP8L", b"\x2f\xff\xff\xff\xff"),
        _riff(b"VP8X", bytes(4) + b"\xff\x3f\x00\xff\x3f\x00"),
    ],
)
def test_a_webp_file_of_many_pixels_is_not_opened(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening takes the memory for all of its pixels, 1 GB here, before the size can be asked for."""
    opened = []
    monkeypatch.setattr(Image, "open", lambda *_, **__: opened.append(1))
    with pytest.raises(RequestError, match="16383 × 16383 pixels|16384 × 16384 pixels"):
        Pixels(3, (8, 8)).decode(content, "a.webp")
    assert not opened


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_sizes_of_webp_files_are_read_as_pil_reads_them(
    lossless: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = io.BytesIO()
    Image.effect_noise((37, 21), 50).convert(mode).save(stored, "WEBP", lossless=lossless)
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr("isomerge.data.images._require_few_pixels", lambda *size: sizes.append(size))
    Pixels(3, (8, 8)).decode(stored.getvalue(), "a.webp")
    assert sizes == [(37, 21), (37, 21)]


@pytest.mark.parametrize(
    ("link", "named"),
    [("data", "data"), ("data", "data/part.txt"), ("folder/test.txt", "folder"), ("images/1", "images"),
     ("images/0/b.png", "images")],
)  # fmt: skip
def test_a_link_that_leads_nowhere_is_named(link: str, named: str, tmp_path: Path) -> None:
    """Also inside a folder, where the part or the class would be missing in silence."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.txt").write_text("some words\n")
    for name in ("0", "2"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / name / "a.png")
    (tmp_path / link).symlink_to("/nowhere/at-all")
    with pytest.raises(RequestError, match="it is a link to /nowhere/at-all, which is not there. Repair"):
        _ = open_data(tmp_path / named).sha256
