"""Images in folders named after their class, on disk or in an archive, as the numbers a model takes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.data.archives import Files, open_files
from isomerge.data.base import KEPT, Batch, Data, Wanted, floating
from isomerge.data.splits import pick_split, same_split, split_in
from isomerge.data.task_heads import match_labels
from isomerge.errors import CheckpointError, RequestError
from isomerge.packages import why_not_imported

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FILE = "preprocessor_config.json"
BILINEAR = 2  # PIL's number
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class Pixels:
    """Resize, crop, scale, normalise. Sizes are (height, width)."""

    channels: int
    crop: tuple[int, int]
    """What the model sees."""
    resize: tuple[int, int] | None = None
    edge: int | None = None
    """Resize so that the shorter edge has this length."""
    resample: int = BILINEAR
    scale: float = 1 / 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def decode(self, content: bytes, name: str) -> np.ndarray:
        """One file as uint8, (channels, height, width)."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content)) as opened:
                image = opened.convert(MODES[self.channels])
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            cause = " ".join(str(error).split())[:120]
            raise RequestError(f"While reading the image {name}: {cause}. Repair or remove it.") from error
        width, height = image.size
        target = self.resize
        if self.edge is not None:
            short = min(width, height)
            target = (int(self.edge * height / short), int(self.edge * width / short))
        if target is not None and (height, width) != target:
            image = image.resize((target[1], target[0]), resample=Image.Resampling(self.resample))
        array = np.asarray(image)
        return _centre(array.reshape(*array.shape[:2], self.channels), self.crop).transpose(2, 0, 1)

    def numbers(self, images: np.ndarray) -> np.ndarray:
        """uint8 (n, channels, height, width) → float32, scaled and normalised in one pass each."""
        result = images.astype(np.float32)
        result *= self.scale
        if self.mean:
            result -= np.asarray(self.mean, np.float32)[:, None, None]
            result /= np.asarray(self.std, np.float32)[:, None, None]
        return result


def pixels_for(checkpoint: Checkpoint) -> Pixels:
    """From the file beside the weights; without one, pixels from −1 to 1 at the size config.json names."""
    try:
        import PIL.Image  # noqa: F401  the part that is compiled
    except ImportError as error:
        raise RequestError(f"Reading images: {why_not_imported('PIL', error)}.") from error
    config = checkpoint.config
    channels = int(config.get("num_channels") or 3)
    if channels not in MODES:
        raise RequestError(f"Reading images for {checkpoint.name}: images have 1, 3 or 4 channels, not {channels}.")
    own = _pair(config.get("image_size"))
    if checkpoint.revision is not None:
        checkpoint.side_files()  # of a hub model: fetches what lies beside the weights
    path = checkpoint.folder / FILE if checkpoint.folder else None
    if path is None or not path.is_file():
        if own is None:
            raise RequestError(
                f"Reading images for {checkpoint.name}: there is no {FILE} beside the weights and no image_size in "
                "config.json, so the size is unknown. Put the model's own preprocessor_config.json there."
            )
        note = f"{checkpoint.name} has no {FILE}: pixels were scaled to −1 … 1 at {own[0]}×{own[1]}"
        half = (0.5,) * channels
        return Pixels(channels, own, resize=own, mean=half, std=half, notes=(note,))
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"While reading {path}: {error}. Copy the original file again.") from error
    return _from_settings(settings, channels, own, str(path))


def _from_settings(settings: Mapping[str, Any], channels: int, own: tuple[int, int] | None, path: str) -> Pixels:
    size = settings.get("size", own)
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else None
    fixed = None if edge else _pair(size)
    crop = _pair(settings.get("crop_size")) if settings.get("do_center_crop") else None
    if edge and crop is None:
        crop = (edge, edge) if settings.get("crop_pct") else own
    share = settings.get("crop_pct")
    if edge and share and edge < 384:  # resized larger, then the middle is cut out
        edge = int(edge / share)
    if settings.get("do_resize", True) is False:
        fixed = edge = None
    seen = crop or fixed or own
    if seen is None:
        raise CheckpointError(f"While reading {path}: it names no size that is understood ({size!r}). Write it as "
                              '{"height": …, "width": …} or {"shortest_edge": …}.')  # fmt: skip
    notes = [f"{FILE} asks for {key}, which is not done here" for key in ("do_pad", "do_flip_channel_order",
             "do_thumbnail", "do_align_long_axis") if settings.get(key)]  # fmt: skip
    mean, std = (
        _values(settings.get(key, 0.5), channels) if settings.get("do_normalize", True) else ()
        for key in ("image_mean", "image_std")
    )
    scale = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0
    resample = int(settings.get("resample", BILINEAR))
    return Pixels(channels, seen, fixed, edge, resample, scale, mean, std, tuple(notes))


def _values(given: Any, channels: int) -> tuple[float, ...]:
    values = tuple(map(float, given)) if isinstance(given, (list, tuple)) else (float(given),)
    return values if len(values) == channels else (values[0],) * channels


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        size = (size["height"], size["width"]) if "height" in size and "width" in size else None
    if isinstance(size, (list, tuple)):
        return (int(size[0]), int(size[-1]))
    return None if size is None else (int(size), int(size))


def _centre(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an image; what is missing at the edges is black."""
    for axis, wanted in enumerate(size):
        have = image.shape[axis]
        if have < wanted:
            before = (wanted - have) // 2
            widths = [(0, 0)] * 3
            widths[axis] = (before, wanted - have - before)
            image = np.pad(image, widths)
        elif have > wanted:
            start = (have - wanted) // 2
            image = image.take(range(start, start + wanted), axis=axis)
    return image


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


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
            raise RequestError(
                f"While reading {path}: there is not one image in it ({', '.join(IMAGE_SUFFIXES[:4])}, …)."
            )
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
    def sha256(self) -> str:
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
        numbers, notes = match_labels(self.classes, checkpoint.config, self.name)
        for text in notes:
            self.note(text)
        return np.array([numbers[label] for label in self._labels if label is not None])

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
        chosen: np.ndarray = images[group]
        return chosen

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
