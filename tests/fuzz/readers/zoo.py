"""Descriptions of models, as `isomerge find` reads them."""

from __future__ import annotations

from pathlib import Path

from fuzz import mutators as m
from fuzz.readers.registry import Seed, reader


def _descriptions() -> list[Seed]:
    import isomerge
    from models import image_pair, scratch
    from samples import digits

    path = scratch() / "description.json"
    isomerge.describe(image_pair()[0], digits(), points=2, score=False, out=path, force=True)
    return [{"description.json": path.read_bytes()}]


@reader("description", _descriptions, {"description.json": m.mutate_json})
def read_and_compare(folder: Path) -> None:
    """A description, and its distance to something."""
    from isomerge.zoo.description import read_description
    from isomerge.zoo.features import MAPS

    found = read_description(folder / "description.json")
    found.embedding.distance(found.embedding, MAPS[found.features].variance)
