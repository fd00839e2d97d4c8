"""Images in folders named after their class, on disk or in an archive."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.data.archives import Files, open_files
from isomerge.data.base import KEPT, Batch, Data, Wanted, floating
from isomerge.data.labels import match_labels
from isomerge.data.pixels import Pixels, pixels_for
from isomerge.data.splits import pick_split, same_split, split_in
from isomerge.errors import RequestError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


class ImageData(Data):
    """`split/class/name.jpg`, or `class/name.jpg`, or images alone."""

    kind = "images"

    def __init__(self, path: Path, *, split: str | None = None, prefer: str = "train") -> None:
        super().__init__()
        # An archive is read once from end to end, so what is not asked for is left out while reading.
        named = None if split is None else same_split(split)
        self._files: Files = open_files(path, lambda n: is_image(n) and (named is None or split_in(n) == named))
        if not self._files.names:
            self._files = open_files(path, is_image)
        if not self._files.names:
            raise RequestError(f"While reading {path}: there is not one image in it ({', '.join(SUFFIXES[:4])}, …).")
        chosen, notes = pick_split([split_in(name) for name in self._files.names], split, prefer, str(path))
        self.notes += notes
        self._names = [n for n in self._files.names if chosen is None or split_in(n) == chosen]
        self.name = f"{path.name} ({chosen})" if chosen else path.name
        self.size = len(self._names)
        self._labels = class_folders(self._names)
        known = sorted({label for label in self._labels if label is not None})
        self.classes = known or None
        self._kept: tuple[Pixels, np.ndarray, np.ndarray] | None = None

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]
        digest = hashlib.sha256()
        for name, label in zip(self._names, self._labels, strict=True):
            content = hashlib.sha256(self._files.read(name)).hexdigest()
            digest.update(f"{label}\t{content}\n".encode())
        return digest.hexdigest()

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        pixels = pixels_for(checkpoint)
        for text in pixels.notes:
            self.note(text)
        numbers = self._numbers(checkpoint) if wanted.labels and self.classes else None
        dtype = floating(checkpoint)
        for group in wanted.order(self.size):
            images = torch.from_numpy(pixels.numbers(self._decoded(pixels, group)))
            batch = {"pixel_values": images.to(wanted.device, dtype)}
            if numbers is not None:
                batch["labels"] = torch.from_numpy(numbers[group]).to(wanted.device)
            yield batch

    def _numbers(self, checkpoint: Checkpoint) -> np.ndarray:
        assert self.classes is not None
        without = [name for name, label in zip(self._names, self._labels, strict=True) if label is None]
        if without:
            raise RequestError(
                f"Reading the classes of {self.name}: {len(without)} images are in no class folder, as "
                f"{name_some(without, 2)}. Put each into a folder named after its class."
            )
        found, notes = match_labels(self.classes, checkpoint.config, self.name)
        for text in notes:
            self.note(text)
        return np.array([found[label] for label in self._labels if label is not None])

    def _decoded(self, pixels: Pixels, group: np.ndarray) -> np.ndarray:
        """uint8 (n, channels, height, width). Kept between passes where all of them fit."""
        shape = (pixels.channels, *pixels.crop)
        if self.size * int(np.prod(shape)) > KEPT:
            return np.stack([self._decode(pixels, int(number)) for number in group])
        if self._kept is None or self._kept[0] != pixels:
            self._kept = (pixels, np.empty((self.size, *shape), np.uint8), np.zeros(self.size, bool))
        _, images, there = self._kept
        for number in group[~there[group]]:
            images[number] = self._decode(pixels, int(number))
            there[number] = True
        return images[group]

    def _decode(self, pixels: Pixels, number: int) -> np.ndarray:
        name = self._names[number]
        return pixels.decode(self._files.read(name), f"{self.name}: {name}")


def class_folders(names: Sequence[str]) -> list[str | None]:
    """The class of each image: the first folder below the split in which they differ.

    >>> class_folders(["cifar/train/cat/1.jpg", "cifar/train/dog/a/2.jpg"])
    ['cat', 'dog']
    >>> class_folders(["1.jpg", "2.jpg"])
    [None, None]
    """
    folders = []
    for name in names:
        parts = name.split("/")[:-1]
        split = next((i for i, part in enumerate(parts) if split_in(f"{part}/x")), None)
        folders.append(parts if split is None else parts[split + 1 :])
    shared = 0
    shortest = min(len(parts) for parts in folders)
    while shared < shortest - 1 and len({parts[shared] for parts in folders}) == 1:
        shared += 1
    return [parts[shared] if len(parts) > shared else None for parts in folders]
