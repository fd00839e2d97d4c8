"""Images from folders and archives, as a plain loop over PIL would read them."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from isomerge.data import Data, open_data
from isomerge.errors import CheckpointError, RequestError
from models import vit
from samples import DIGITS, write_digits


def everything(data: Data, checkpoint: object, **options: object) -> dict[str, torch.Tensor]:
    batches = list(data.batches(checkpoint, **options))  # type: ignore[arg-type]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def as_set(images: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, bytes]]:
    """Order aside, what was read."""
    return sorted((int(n), image.numpy().tobytes()) for image, n in zip(images, labels, strict=True))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    write_digits(tmp_path / "digits")
    return tmp_path / "digits"


def expected(folder: Path, names: list[str], mean: float = 0.5, std: float = 0.5) -> list[tuple[int, bytes]]:
    found = []
    for path in folder.rglob("*.png"):
        pixels = torch.tensor(np.asarray(Image.open(path)), dtype=torch.float32)[None]
        found.append((names.index(path.parent.name), ((pixels * (1 / 255) - mean) / std).numpy().tobytes()))
    return sorted(found)


def packed(folder: Path, kind: str) -> Path:
    out = folder.with_suffix(kind)
    if kind == ".zip":
        with zipfile.ZipFile(out, "w") as archive:
            for path in folder.rglob("*.png"):
                archive.write(path, path.relative_to(folder.parent).as_posix())
    else:
        mode = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz"}[kind]
        with tarfile.open(out, mode) as archive:  # type: ignore[call-overload]
            archive.add(folder, folder.name)
    return out


@pytest.mark.parametrize("kind", ["folder", ".tar", ".tar.gz", ".tar.xz", ".zip"])
def test_folders_and_archives_give_the_pixels_and_classes_that_pil_reads(
    kind: str, sample: Path, tmp_path: Path
) -> None:
    model = vit(tmp_path / "model", ["Two", "ZERO", "one"])
    data = open_data(sample if kind == "folder" else packed(sample, kind), split="test")
    assert (data.kind, data.size, data.classes) == ("images", 36, sorted(DIGITS))
    got = everything(data, model, batch_size=7, labels=True)
    assert as_set(got["pixel_values"], got["labels"]) == expected(sample, ["two", "zero", "one"])
    again = everything(data, model, batch_size=5, labels=True)
    assert torch.equal(got["pixel_values"], again["pixel_values"])  # whatever the batch, the same order
    assert data.sha256 == open_data(sample).sha256
    assert any("preprocessor_config.json" in note for note in data.notes)


def test_the_settings_beside_the_weights_are_obeyed(tmp_path: Path) -> None:
    model = vit(tmp_path / "model", ["x", "y"], size=12, channels=3)
    settings = {
        "do_resize": True, "size": {"shortest_edge": 16}, "do_center_crop": True,
        "crop_size": {"height": 12, "width": 12},
        "resample": 3, "rescale_factor": 1 / 128, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6],
    }  # fmt: skip
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    random = np.random.default_rng(0)
    shapes = {"x": (20, 40), "y": (37, 23)}
    for name, (height, width) in shapes.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / name / "1.png")
    got = everything(open_data(tmp_path / "pictures"), model, labels=True)
    for image, label in zip(got["pixel_values"], got["labels"], strict=True):
        height, width = shapes[name := "xy"[int(label)]]
        size = (32, 16) if name == "x" else (16, int(16 * 37 / 23))
        picture = Image.open(tmp_path / "pictures" / name / "1.png").resize(size, Image.Resampling.BICUBIC)
        left, top = (size[0] - 12) // 2, (size[1] - 12) // 2
        pixels = np.asarray(picture.crop((left, top, left + 12, top + 12)), np.float64) / 128
        truth = (pixels - [0.1, 0.2, 0.3]) / [0.4, 0.5, 0.6]
        torch.testing.assert_close(image.double(), torch.tensor(truth.transpose(2, 0, 1)), rtol=1e-5, atol=1e-5)


def test_pixels_are_those_of_the_stock_image_processor(sample: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, "ViTImageProcessorPil", None) or transformers.ViTImageProcessor
    made = processor(size={"height": 10, "width": 10}, image_mean=[0.2] * 3, image_std=[0.3] * 3)
    model = vit(tmp_path / "model", DIGITS, size=10, channels=3)
    made.save_pretrained(tmp_path / "model")
    got = everything(open_data(sample), model, labels=True)
    pictures = [Image.open(path).convert("RGB") for path in sorted(sample.rglob("*.png"))]
    truth = made(pictures, return_tensors="pt")["pixel_values"]
    left = sorted(float(image.double().sum()) for image in got["pixel_values"])
    right = sorted(float(image.double().sum()) for image in truth)
    torch.testing.assert_close(torch.tensor(left), torch.tensor(right), rtol=1e-4, atol=1e-3)


def test_limits_are_drawn_evenly_over_the_classes(sample: Path, tmp_path: Path) -> None:
    model = vit(tmp_path / "model", DIGITS)
    data = open_data(sample)
    got = everything(data, model, limit=9, labels=True)
    whole = torch.bincount(everything(data, model, labels=True)["labels"])
    assert (torch.bincount(got["labels"]) - whole / 4).abs().max() <= 1
    other = everything(data, model, limit=9, labels=True, seed=1)
    assert not torch.equal(got["pixel_values"], other["pixel_values"])
    assert set(next(iter(data.batches(model)))) == {"pixel_values"}


def test_parts_are_found_and_a_choice_is_told(sample: Path, tmp_path: Path) -> None:
    (sample / "train" / "one").mkdir(parents=True)
    Image.new("L", (8, 8)).save(sample / "train" / "one" / "x.png")
    assert open_data(sample).size == 1 and open_data(sample, prefer="test").size == 36
    assert "using split 'train'" in open_data(sample).notes[0]
    with pytest.raises(RequestError, match="no part 'validation'.*It has test, train"):
        open_data(sample, split="dev")


def test_bad_images_and_folders_are_told(sample: Path, tmp_path: Path) -> None:
    model = vit(tmp_path / "model", ["cat", "dog", "cow"])
    with pytest.raises(RequestError, match="no 'one', 'two', 'zero'.*the model has 'cat', 'dog', 'cow'"):
        list(open_data(sample).batches(model, labels=True))
    (sample / "test" / "one" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(RequestError, match="broken.png"):
        list(open_data(sample).batches(vit(tmp_path / "m2", DIGITS)))
    (tmp_path / "cut.tar.xz").write_bytes(packed(sample, ".tar.xz").read_bytes()[:-200])
    with pytest.raises(RequestError, match="cut.tar.xz"):
        open_data(tmp_path / "cut.tar.xz")
    (tmp_path / "bad.zip").write_bytes(b"PK nothing")
    with pytest.raises(RequestError, match="bad.zip"):
        open_data(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(RequestError, match="not one image"):
        open_data(tmp_path / "empty.zip")
    (tmp_path / "model" / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="preprocessor_config.json"):
        list(open_data(sample).batches(model))


def test_classes_without_names_are_taken_in_sorted_order_and_numbers_as_numbers(sample: Path, tmp_path: Path) -> None:
    nameless = vit(tmp_path / "model", ["LABEL_0", "LABEL_1", "LABEL_2"])
    data = open_data(sample)
    got = everything(data, nameless, labels=True)
    assert as_set(got["pixel_values"], got["labels"]) == expected(sample, sorted(DIGITS))
    assert any("sorted order" in note for note in data.notes)
    for number, name in enumerate(DIGITS):
        (sample / "test" / name).rename(sample / "test" / str(number))
    got = everything(open_data(sample), nameless, labels=True)
    assert as_set(got["pixel_values"], got["labels"]) == expected(sample, ["0", "1", "2"])
