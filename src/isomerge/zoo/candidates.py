"""Which models a search goes through: folders of models, models, and descriptions without their models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.addresses import is_url
from isomerge.arguments import require_types, usable_path
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.side_files import is_weight
from isomerge.errors import NotFoundError, RequestError
from isomerge.zoo.description import NAME, DescriptionFile, is_description, read_description


@dataclass(frozen=True)
class ZooModel:
    """A model that may be useful: its weights, its description, or both."""

    name: str
    model: str | None
    description: DescriptionFile | None

    def opened(self) -> Checkpoint | None:
        return None if self.model is None else open_checkpoint(self.model)


def candidates_in(models: Any) -> list[ZooModel]:
    """In the order they were named; of a folder, by name."""
    listed = [models] if isinstance(models, (str, os.PathLike)) else models
    if not isinstance(listed, Sequence) or not listed:
        raise RequestError(
            "Finding a model: models must be a list of models, of descriptions, or of folders that hold them.",
            keys=("models",),
        )
    found: list[ZooModel] = []
    for one in listed:
        require_types(models=(one, str, os.PathLike))
        found += _in_place(os.fspath(one))
    return found


def _in_place(given: str) -> list[ZooModel]:
    if is_url(given):
        return [ZooModel(given, given, None)]
    path = usable_path(given, "looking for models in")
    if path.is_file() and path.suffix == ".json":
        beside = path.parent if path.name == NAME and _is_model(path.parent) else None
        return [ZooModel(str(beside or path), None if beside is None else str(beside), read_description(path))]
    if path.is_file() or _is_model(path) or (path.is_dir() and (path / NAME).is_file()):
        return [_folder(path, given)]
    if not path.is_dir():
        if os.sep in given.rstrip(os.sep) and given.count("/") == 1 and not path.parent.exists():
            return [ZooModel(given, given, None)]  # a model of the hub
        raise NotFoundError(f"Looking for models in {given}: there is no such file or folder. Check the path.")
    inside = [one for one in sorted(path.iterdir()) if not one.name.startswith(".")]
    found = [_folder(one, str(one)) for one in inside if one.is_dir() and (_is_model(one) or (one / NAME).is_file())]
    loose = [one for one in inside if one.is_file() and one.name.endswith(".json") and is_description(one)]
    found += [ZooModel(str(one), None, read_description(one)) for one in loose]
    if not found:
        raise RequestError(
            f"Looking for models in {given}: it holds no model and no description. Name a folder of models, or write "
            "descriptions with isomerge describe.",
            keys=("models",),
        )
    return found


def _folder(path: Path, name: str) -> ZooModel:
    description = path / NAME
    model = str(path) if path.is_file() or _is_model(path) else None
    return ZooModel(name, model, read_description(description) if description.is_file() else None)


def _is_model(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file() and any(is_weight(one.name) for one in path.iterdir())
