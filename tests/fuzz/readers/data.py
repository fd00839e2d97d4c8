"""Pictures, archives and tables, and what prepares them for a model."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import mutators as m
from fuzz.readers.registry import SMALL, Seed, reader, stored


def _picture(kind: str, size: tuple[int, int] = (8, 6)) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    image = Image.frombytes("RGB", size, bytes(range(size[0] * size[1])) * 3)
    image.save(made, kind, **({"save_all": True} if kind == "GIF" else {}))
    return made.getvalue()


PICTURES = {
    "a.png": "PNG",
    "a.jpg": "JPEG",
    "a.gif": "GIF",
    "a.bmp": "BMP",
    "a.webp": "WEBP",
    "a.tif": "TIFF",
    "a.ppm": "PPM",
}


@reader("image", lambda: [{name: _picture(kind)} for name, kind in PICTURES.items()],
        dict.fromkeys(PICTURES, m.mutate_bytes))  # fmt: skip
def read_image(folder: Path) -> None:
    from isomerge.data.images import Pixels

    (path,) = folder.iterdir()
    Pixels(3, (4, 4), edge=5).decode(path.read_bytes(), path.name)


SETTINGS = {
    "do_resize": True, "size": {"height": 8, "width": 8}, "do_center_crop": True, "resample": 3, "do_rescale": True,
    "crop_size": {"height": 6, "width": 6}, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392,
}  # fmt: skip


def _preprocessors() -> list[Seed]:
    rest = {"model.safetensors": stored(SMALL), "config.json": b'{"num_channels": 3, "image_size": 8}'}
    short = {**SETTINGS, "size": {"shortest_edge": 8}, "crop_pct": 0.9, "do_center_crop": False}
    return [{"preprocessor_config.json": json.dumps(one).encode(), **rest} for one in (SETTINGS, short)] + [rest]


@reader("preprocessor", _preprocessors, {"preprocessor_config.json": m.mutate_json, "config.json": m.mutate_json})
def read_preprocessor(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint
    from isomerge.data.images import pixels_for

    pixels = pixels_for(open_checkpoint(folder))
    pixels.numbers(pixels.decode(PNG, "a.png")[None])


PNG = _picture("PNG")


def _archives() -> list[Seed]:
    names = ("train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), PNG)
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(PNG)
            archive.addfile(entry, io.BytesIO(PNG))
    plain = tarred.getvalue()
    return [{"a.zip": zipped.getvalue()}, {"a.tar": plain}, {"a.tar.gz": gzip.compress(plain, mtime=0)}]


@reader("archive", _archives, {"a.zip": m.mutate_zip, "a.tar": m.mutate_tar, "a.tar.gz": m.mutate_tar})
def read_archive(folder: Path) -> None:
    from isomerge.data.images import Pixels
    from isomerge.data.open import open_data

    (path,) = folder.iterdir()
    data = open_data(path)
    assert data.sha256
    data._decode(Pixels(3, (4, 4)), 0)  # type: ignore[attr-defined]


TABLES: Seed = {
    "a.csv": b'text,label\nhello there,1\n"good, bye",0\nwhat is it,1\n',
    "a.tsv": b"id\tsentence1\tsentence2\tlabel\n1\ta b c\td e f\t1\n2\tg h i\tj k l\t0\n",
    "a.txt": b"first line of a text\nsecond line of it\n\nthird\n",
    "a.conll": b"Rome B-1\nis O\n\nHello O\n",
    "a.jsonl": b'{"text": "a b c", "label": 1}\n{"text": "d e f", "label": 0}\n',
    "a.json": b'[{"tokens": ["a", "b"], "ner_tags": ["0", "1"]}, {"tokens": ["c"], "ner_tags": ["0"]}]',
    "b.json": b'{"data": [{"question": "a", "answer": "b", "split": "train"}]}',
}
CHANGES: dict[str, m.Mutator] = {
    name: m.mutate_jsonl if name.endswith("jsonl") else m.mutate_json if name.endswith("json") else m.mutate_lines
    for name in TABLES
}


@reader("table", lambda: [{name: text} for name, text in TABLES.items()], CHANGES)
def read_table(folder: Path) -> None:
    from isomerge.data.open import open_data
    from isomerge.data.texts import _Targets

    (path,) = folder.iterdir()
    data = open_data(path)
    assert data.sha256 and data.describe()
    if data.kind in ("texts", "pairs", "tokens"):
        config = {
            "id2label": {"0": "0", "1": "1", "2": "O", "3": "B-1"},
            "architectures": ["XForSequenceClassification"],
        }
        task = "token" if data.kind == "tokens" else "sequence"
        targets = _Targets(data, Stub(config), task)  # type: ignore[arg-type]
        targets.usable()


@dataclass
class Stub:
    """As much of a checkpoint as labels need."""

    config: dict[str, Any]
