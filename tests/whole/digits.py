"""Scikit-learn's digits as folders of images, and tiny models for them."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner, Result

from align.tiny import model
from isomerge.cli.app import app

CLASSES = 5  # as many as the tiny image model has outputs


@cache
def digits(first: int = 0, count: int = 90) -> Path:
    """A folder of class folders: `count` images from the one with this number on."""
    folder = Path(tempfile.mkdtemp(prefix="isomerge-digits-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    images, labels = load_digits(return_X_y=True)
    for number in range(first, first + count):
        place = folder / f"LABEL_{labels[number] % CLASSES}"
        place.mkdir(exist_ok=True)
        pixels = (images[number].reshape(8, 8) * 15).astype("uint8")
        Image.fromarray(pixels).convert("RGB").save(place / f"{number:04}.png")
    return folder


def pair() -> list[str]:
    return [str(model("vit", seed, torch.float32)) for seed in (0, 1)]


def verb(*arguments: Any) -> Result:
    """Run a verb of the command line, in this process: importing torch anew takes longer than any merge here."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(*arguments: Any) -> dict[str, Any]:
    """The record that a verb prints; it must have gone well."""
    done = verb(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
