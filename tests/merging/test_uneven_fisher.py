"""Fisher information of another order of magnitude: said, as the merge is nearly one of the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

import isomerge
from models import model, noisy, tensors


def notes_of(folder: Path, times: float, **options: Any) -> list[str]:
    """Of a merge of two siblings, the second of which has so many times the information."""
    first = model("vit", 0)
    files = [folder / "first.safetensors", folder / "second.safetensors"]
    for file, factor in zip(files, (1.0, times), strict=True):
        save_file({name: torch.full_like(t, factor) for name, t in tensors(first).items()}, file)
    models = [first, noisy(first, 0.05)]
    merged = isomerge.merge(models, method="fisher", importance=[str(file) for file in files], **options)
    return [note for note in merged.report()["notes"] if "information" in note]


def test_a_model_that_will_hardly_count_is_named(tmp_path: Path) -> None:
    (note,) = notes_of(tmp_path, 36_000.0)
    first = model("vit", 0)
    assert (
        f"of {noisy(first, 0.05)}, by its weight, is about 36,000 times that of {first}" in note
        and "`normalize`" in note
    )


def test_one_without_any_information_is_named(tmp_path: Path) -> None:
    (note,) = notes_of(tmp_path, 0.0)
    assert f"any number of times that of {noisy(model('vit', 0), 0.05)}" in note


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (20.0, {}),
        (1.0, {}),
        (36_000.0, {"normalize": True}),
        (36_000.0, {"weights": [36_000.0, 1.0]}),
        (36_000.0, {"weights": [0.0, 1.0]}),
    ],
)
def test_models_that_count_are_not(tmp_path: Path, times: float, options: dict[str, Any]) -> None:
    assert notes_of(tmp_path, times, **options) == []


def test_the_hashes_of_the_lock_are_those_of_the_files(tmp_path: Path) -> None:
    """Looking at some rows beforehand must not stand for a whole pass, nor keep one from being hashed."""
    assert notes_of(tmp_path, 36_000.0)
    files = [str(tmp_path / f"{name}.safetensors") for name in ("first", "second")]
    first = model("vit", 0)
    isomerge.merge([first, noisy(first, 0.05)], method="fisher", importance=files).save(tmp_path / "out")
    lock = json.loads((tmp_path / "out" / "isomerge.lock.json").read_text())
    found = {entry["source"]: entry["tensors"] for entry in lock["inputs"]}
    for file in files:
        stored = {n: blake3(t.contiguous().numpy().tobytes()).hexdigest() for n, t in load_file(file).items()}
        assert {name: entry["hash"] for name, entry in found[file].items()} == stored
