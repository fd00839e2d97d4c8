"""Images in folders named after their class, on disk or in an archive, as the numbers a model takes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.data.archives import Files, open_files
from isomerge.data.base import KEPT, Batch, Content, Data, Wanted, draw, floating
from isomerge.data.splits import pick_split, same_split, split_in
from isomerge.data.task_heads import match_labels
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, checked, first_fault, read_json
from isomerge.packages import why_not_imported

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The same for PIL, which would try every format it knows on the content, whatever the suffix."""
FILE = "preprocessor_config.json"
BILINEAR = 2  # PIL's number
THUMBNAIL = 8  # pixels of an edge, where a picture is compared with others apart from any model
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
MOST_PIXELS = 50_000_000
"""Of one image: a fifth of a gigabyte once decoded."""
LONGEST_EDGE = 8192
"""That a model may see."""


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
        from PIL import Image

        try:
            _require_few_pixels_of_webp(content)
            with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
                _require_few_pixels(*opened.size)
                opened.load()
                wanted = MODES[self.channels]
                image = opened if opened.mode == wanted else opened.convert(wanted)  # no copy where none is needed
                image.load()
            width, height = image.size
            target = self.resize
            if self.edge is not None:
                short = min(width, height)
                target = (int(self.edge * height / short), int(self.edge * width / short))
                _require_few_pixels(*target)
        except Exception as error:  # every format fails in its own way
            cause = " ".join(str(error).split())[:120] or type(error).__name__
            raise RequestError(f"While reading the image {name}: {cause}. Repair or remove it.") from error
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
    _require_pil()
    config = checkpoint.config
    channels = config.get("num_channels") or 3
    if type(channels) is not int or channels not in MODES:
        raise RequestError(f"Reading images for {checkpoint.name}: images have 1, 3 or 4 channels, not {channels}.")
    try:
        own = TypeAdapter(Size | None).validate_python(_pair(config.get("image_size")))
    except ValidationError as error:
        raise CheckpointError(
            f"While reading config.json of {checkpoint.name}: image_size: {first_fault(error)}. Copy the original file "
            "again."
        ) from error
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
        content = read_json(path)
        settings = checked(Preprocessor, content)
    except (JsonError, OSError) as error:
        raise CheckpointError(f"While reading {path}: {error}. Copy the original file again.") from error
    return _from_settings(settings, content, channels, own, str(path))


def _require_pil() -> None:
    try:
        import PIL.Image  # noqa: F401  the part that is compiled
    except ImportError as error:
        raise RequestError(f"Reading images: {why_not_imported('PIL', error)}.") from error


def _from_settings(
    settings: Preprocessor, content: Mapping[str, Any], channels: int, own: tuple[int, int] | None, path: str
) -> Pixels:
    edge = settings.size.shortest_edge if isinstance(settings.size, ShortestEdge) else None
    fixed = own if settings.size is None else None if isinstance(settings.size, ShortestEdge) else settings.size
    crop = settings.crop_size if settings.do_center_crop else None
    share = settings.crop_pct
    if edge and crop is None:
        crop = (edge, edge) if share else own
    if edge and share and edge < 384:  # resized larger, then the middle is cut out
        edge = int(edge / share)
    if settings.do_resize is False:
        fixed = edge = None
    seen = crop or fixed or own
    if seen is None:
        given = str(content.get("size"))[:60]
        raise CheckpointError(
            f"While reading {path}: it names no size that is understood ({given}). Write it as "
            '{"height": …, "width": …} or {"shortest_edge": …}.'
        )
    notes = [f"{FILE} asks for {key}, which is not done here" for key in ("do_pad", "do_flip_channel_order",
             "do_thumbnail", "do_align_long_axis") if content.get(key)]  # fmt: skip
    given_values = (settings.image_mean, settings.image_std)
    mean, std = (_values(values, channels) if settings.do_normalize else () for values in given_values)
    scale = settings.rescale_factor if settings.do_rescale else 1.0
    return Pixels(channels, seen, fixed, edge, settings.resample, scale, mean, std, tuple(notes))


def _values(given: float | list[float], channels: int) -> tuple[float, ...]:
    values = tuple(map(float, given)) if isinstance(given, list) else (float(given),)
    return values if len(values) == channels else (values[0],) * channels


def _pair(size: Any) -> Any:
    """(height, width) in any of the ways to write it; what is none of them is left for the check."""
    if isinstance(size, Mapping):
        return (size["height"], size["width"]) if "height" in size and "width" in size else None
    if isinstance(size, (list, tuple)) and size:
        return (size[0], size[-1])
    return (size, size) if isinstance(size, (int, float)) else size


Edge = Annotated[int, Field(ge=1, le=LONGEST_EDGE, strict=False)]
Size = tuple[Edge, Edge]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Switch = Annotated[bool, BeforeValidator(bool)]
"""Some write null for no."""


class ShortestEdge(BaseModel):
    shortest_edge: Edge


def _read_size(size: Any) -> Any:
    short = isinstance(size, Mapping) and size.get("shortest_edge")
    return {"shortest_edge": short} if short else _pair(size)


class Preprocessor(BaseModel):
    """What is read of preprocessor_config.json."""

    size: Annotated[Size | ShortestEdge | None, BeforeValidator(_read_size)] = None
    crop_size: Annotated[Size | None, BeforeValidator(_pair)] = None
    crop_pct: Annotated[float, Field(ge=0.1, le=1)] | None = None
    do_center_crop: Switch = False
    do_resize: Switch = True
    do_rescale: Switch = True
    do_normalize: Switch = True
    image_mean: Number | Annotated[list[Number], Field(min_length=1)] = 0.5
    image_std: Number | Annotated[list[Number], Field(min_length=1)] = 0.5
    rescale_factor: Number = 1 / 255
    resample: Annotated[int, Field(ge=0, le=5)] = BILINEAR


def _require_few_pixels(width: int, height: int) -> None:
    """Before they are decoded: a few bytes can stand for as many as there are addresses."""
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise ValueError(f"it has {width} × {height} pixels, and at most {MOST_PIXELS:,} are read")


def _require_few_pixels_of_webp(content: bytes) -> None:
    """PIL takes the memory for all of them when it opens a WebP file, before its size can be asked for."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return
    kind, rest = content[12:16], content[20:30]
    if kind == b"VP8X":
        width, height = 1 + int.from_bytes(rest[4:7], "little"), 1 + int.from_bytes(rest[7:10], "little")
    elif kind == b"VP8L":
        bits = int.from_bytes(rest[1:5], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:  # "VP8 "
        width, height = (int.from_bytes(part, "little") & 0x3FFF for part in (rest[6:8], rest[8:10]))
    _require_few_pixels(width, height)


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

    def contents(self, limit: int | None = None, seed: int = 0) -> Iterator[Content]:
        _require_pil()
        small = (THUMBNAIL, THUMBNAIL)
        pixels = Pixels(3, small, resize=small)
        for number in draw(self.size, self.used(limit), seed):
            yield Content(self._decode(pixels, int(number)), self._labels[int(number)])

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
