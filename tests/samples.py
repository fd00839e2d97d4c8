"""A little data for the tiny models: sentences, images of handwritten digits, random batches, a recipe."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

WORDS = [
    "the", "a", "cat", "dog", "bird", "sat", "ran", "slept", "on", "mat", "hill", "was", "good", "bad", "film", "very",
    "and", "not", "in", "rome", "paris", "lives", "anna", "bob",
]  # fmt: skip
SENTENCES = [
    "the cat sat on the mat", "a dog ran", "the film was very good", "the film was bad and the dog slept",
    "anna lives in rome", "bob was in paris and anna was not", "a bird sat on a hill", "not good not bad",
    "the dog and the cat ran on the hill", "very very good film", "a bad bad dog", "the bird slept",
]  # fmt: skip

Batches = Callable[[], Iterator[dict[str, Tensor]]]


def batches(folder: Path, count: int = 4, size: int = 8) -> Batches:
    """Random pixels or tokens, the same at every call."""
    config = transformers.AutoConfig.from_pretrained(folder)

    def fresh() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(count):
            if hasattr(config, "image_size"):
                shape = (size, config.num_channels, config.image_size, config.image_size)
                yield {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
            else:
                tokens = torch.randint(3, config.vocab_size, (size, 9), generator=generator)
                yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    return fresh


DIGITS = ["zero", "one", "two"]


def write_digits(folder: Path, count: int = 36) -> list[tuple[np.ndarray, int]]:
    """Handwritten digits 0, 1, 2 of scikit-learn as `test/<class>/n.png`; returned in the order of the files' names."""
    from sklearn.datasets import load_digits

    data = load_digits(n_class=3)
    images = []
    for number in range(count):
        pixels, label = (data.images[number] * 15).astype(np.uint8), int(data.target[number])
        path = folder / "test" / DIGITS[label] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        images.append((pixels, label))
    return images


CLASSES = 5  # as many as the tiny image model has outputs


@cache
def digits(first: int = 0, count: int = 90) -> Path:
    """A folder of class folders: `count` images from the one with this number on."""
    from sklearn.datasets import load_digits

    folder = Path(tempfile.mkdtemp(prefix="isomerge-digits-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    images, labels = load_digits(return_X_y=True)
    for number in range(first, first + count):
        place = folder / f"LABEL_{labels[number] % CLASSES}"
        place.mkdir(exist_ok=True)
        pixels = (images[number].reshape(8, 8) * 15).astype("uint8")
        Image.fromarray(pixels).convert("RGB").save(place / f"{number:04}.png")
    return folder


def in_two_documents(first: Path, second: Path, third: Path) -> str:
    """A recipe: the mean of two models, and then the mean of that and another one."""
    return f"""
name: inner
merge_method: linear
models: [{{model: {first}}}, {{model: {second}}}]
---
merge_method: linear
models: [{{model: inner}}, {{model: {third}}}]
"""
