"""The description of a model: a small file beside it that says what it was trained on, in points that no example is.

{"format": 1, "model": "model-a", "task": "image", "labels": ["cat", "dog"], "parameters": 69000,
 "features": "image-1", "examples": 2000, "points": [[0.1, …], …], "weights": [0.4, …], "error": 0.03, …}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from isomerge.addresses import is_url
from isomerge.arguments import usable_path
from isomerge.errors import CheckpointError, NotFoundError, RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.reporting.record import write_text
from isomerge.zoo.embedding import Embedding
from isomerge.zoo.features import MAPS

FORMAT = 1
NAME = "isomerge-description.json"
Small = Annotated[float, Field(ge=-1e6, le=1e6)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class DescriptionFile(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1]
    isomerge: str
    model: str
    """The name of its folder, for people; not where it is."""
    task: str | None
    """What its class is for."""
    labels: list[str] | None
    parameters: Count
    features: str
    examples: Annotated[int, Field(ge=1, lt=2**63)]
    """How many of the data are in the embedding."""
    points: Annotated[list[list[Small]], Field(min_length=1, max_length=4096)]
    weights: list[Small]
    error: Annotated[float, Field(ge=0)]
    """How far the points are from the data, as a share of the data's own length."""
    loss: float | None
    metric: float | None
    metric_name: str | None

    @model_validator(mode="after")
    def _fits(self) -> DescriptionFile:
        if self.features not in MAPS:
            raise ValueError(f"features are '{self.features:.40}', and known are {', '.join(MAPS)}")
        if {len(point) for point in self.points} != {MAPS[self.features].width}:
            raise ValueError(f"a point of {self.features} has {MAPS[self.features].width} numbers")
        if len(self.weights) != len(self.points):
            raise ValueError(f"there are {len(self.points)} points and {len(self.weights)} weights")
        return self

    @property
    def embedding(self) -> Embedding:
        return Embedding(np.array(self.points, dtype=float), np.array(self.weights, dtype=float))


def place_for(model: Any, out: str | os.PathLike[str] | None, *, force: bool) -> Path:
    """Where the description goes: beside the weights, or where it was asked for; an error where a file is."""
    if out is None:
        folder = None if not isinstance(model, (str, os.PathLike)) or is_url(os.fspath(model)) else usable_path(
            model, "describing")  # fmt: skip
        if folder is None or not folder.is_dir():
            raise RequestError(
                "Describing a model: it is no folder on this machine, so nothing can lie beside it. Name the file to "
                "write as out.",
                keys=("out",),
            )
        target = folder / NAME
    else:
        target = usable_path(out, "writing the description")
        target = target / NAME if target.is_dir() else target
    if not target.parent.is_dir():
        raise RequestError(
            f"Writing the description {target}: there is no folder {target.parent}. Make it first.", keys=("out",)
        )
    if target.exists() and not force:
        raise RequestError(
            f"Writing the description {target}: the file exists. Pass force to replace it.", keys=("force",)
        )
    return target


def write_description(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def is_description(path: Path) -> bool:
    """Whether a file that nobody named is meant to be one; one that is damaged is."""
    try:
        content = read_json(path)
    except (OSError, JsonError):
        return True
    return isinstance(content, dict) and content.keys() >= {"format", "features"}


def read_description(path: str | os.PathLike[str]) -> DescriptionFile:
    """A description, or an error that says what is wrong with the file."""
    file = usable_path(path, "reading the description")
    act = f"While reading the description {file}"
    try:
        return checked(DescriptionFile, read_json(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{act}: there is no such file. Write it with isomerge describe.") from error
    except (OSError, JsonError) as error:
        raise CheckpointError(f"{act}: {error}. Describe the model again.") from error
