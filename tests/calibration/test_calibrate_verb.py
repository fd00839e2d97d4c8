"""`isomerge calibrate` on real images: the file it writes holds what the images themselves give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from calibration.hooks import inputs_by_module, rows, stock
from isomerge.calibration import open_statistics
from isomerge.checkpoint import open_checkpoint
from isomerge.cli.calibrate import calibrate
from isomerge.data import open_data
from isomerge.errors import RequestError
from models import vit
from samples import DIGITS, write_digits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("calibrate")
    write_digits(folder / "digits")
    vit(folder / "model", DIGITS)
    return folder / "model", folder / "digits"


def call(*words: object) -> Result:
    app = typer.Typer()
    app.command()(calibrate)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_file_holds_the_gram_matrices_of_the_images(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, images = folders
    words = ("--data", images, "-o", tmp_path / "s.safetensors", "--limit", 9, "--what", "gram,fisher")
    done = call(model, *words, "--json")
    assert done.exit_code == 0, done.exception
    record = json.loads(done.stdout)
    assert record["examples"] == 9 and record["bytes"] > 0 and record["what"] == ["fisher", "gram"]
    found = open_statistics(tmp_path / "s.safetensors")
    assert found.info["source_sha256"] == open_data(images).sha256
    module = stock(model, torch.float32)
    batch = next(open_data(images).batches(open_checkpoint(model), batch_size=9, limit=9))
    x = rows(inputs_by_module(module, batch)["classifier"], batch, "classifier")
    np.testing.assert_allclose(found.gram("classifier.weight").product.numpy(), x.T @ x, rtol=1e-4, atol=1e-5)
    assert found.fisher["classifier.weight"].abs().sum() > 0


def test_labels_of_the_folders_make_the_empirical_information(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, images = folders
    words = ("--data", images, "-o", tmp_path / "s.safetensors", "--limit", 4, "--what", "fisher", "--quiet")
    done = call(model, *words, "--fisher", "empirical")
    assert done.exit_code == 0, done.exception
    assert done.stdout == ""
    assert open_statistics(tmp_path / "s.safetensors").info["fisher"]["kind"] == "empirical"


def test_wrong_requests_are_refused_before_any_work(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, images = folders
    wrong = call(model, "--data", images, "-o", tmp_path / "s.safetensors", "--what", "gramm")
    assert isinstance(wrong.exception, RequestError) and "Did you mean 'gram'" in str(wrong.exception)
    (tmp_path / "there").write_text("mine")
    occupied = call(model, "--data", images, "-o", tmp_path / "there")
    assert isinstance(occupied.exception, RequestError) and "already exists" in str(occupied.exception)
    assert (tmp_path / "there").read_text() == "mine"
