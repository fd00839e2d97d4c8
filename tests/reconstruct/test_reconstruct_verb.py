"""`isomerge merge --method reconstruct` against the function it calls, on real digits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from align.tiny import model, tensors
from isomerge.checkpoint import open_checkpoint
from isomerge.data import open_data
from isomerge.merge.reconstruct import reconstruct


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    for number, (pixels, label) in enumerate(zip(images[:120], labels[:120], strict=True)):
        place = folder / str(label % 5)
        place.mkdir(exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) * 15).astype("uint8")).convert("RGB").save(place / f"{number:04}.png")
    return folder


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isomerge", "merge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_verb_writes_what_the_function_makes(digits: Path, tmp_path: Path) -> None:
    models = [model("vit", seed, torch.float32) for seed in (0, 1)]
    flags = ["--method", "reconstruct", "--data", digits, "--limit", 100, "--ridge", "0.1", "--weights", "0.3,0.7"]
    done = run(*models, *flags, "--align", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["aligned"] and record["data"]["size"] == 120 and record["sha256"] and record["tensors"]
    batches = open_data(digits).passes(open_checkpoint(models[0]), limit=100)
    expected = reconstruct(models, batches, weights=[0.3, 0.7], ridge=0.1).state_dict()
    found = tensors(tmp_path / "out")
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())


def test_wrong_requests_say_what_to_write(digits: Path, tmp_path: Path) -> None:
    models = [model("vit", seed, torch.float32) for seed in (0, 1)]
    for flags, words in (
        (["--method", "reconstruct"], "needs data"),
        (
            ["--method", "reconstruct", "--data", digits, "--density", "0.5"],
            "--density is not an option of reconstruct",
        ),
        (["--method", "reconstruct", "--data", digits, "--base", models[0]], "--base has no effect with"),
        (["--data", digits], "--data has no effect without --method reconstruct"),
    ):
        told = run(*models, *flags, "-o", tmp_path / "out")
        assert told.returncode == 2 and words in told.stderr, told.stderr
    assert not (tmp_path / "out").exists()
