"""Points that were measured, in a file beside the results: a sweep that is called again goes on from them."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from isomerge import __version__
from isomerge.checkpoint import Checkpoint
from isomerge.choices import MODEL, POINTS
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.external_tasks import find_function, is_custom
from isomerge.json_files import JsonError, checked, parse_json
from isomerge.merging.recipe import Recipe
from isomerge.results import plain

OWN = (POINTS, "sweep.json", "search.json", "best.yml", "sweep.svg", "search.svg", MODEL)


class SavedScores(BaseModel):
    losses: list[float | None]
    counts: list[float]
    right: list[float] | None


class SavedPoint(BaseModel):
    """One line: what `add` writes."""

    key: str
    loss: float | None
    metric: float | None
    seconds: float | None
    broken: list[Literal["loss", "metric", "seconds"]]
    metric_name: str | None
    higher_is_better: bool | None
    examples: int | None
    parent: str | None = None
    each: SavedScores | None = None


FACTS = ("metric_name", "higher_is_better", "examples")
"""What is known of a measure beside its numbers."""
NOTES = (".json", ".txt", ".model")
"""How files end that say how to run a model: its config, an adapter's, a tokenizer, how images are read."""

Numbers = dict[str, Any]


def reserve(out: Path, *, force: bool) -> None:
    """Refuse a folder that holds something else."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"Writing results into {out}: it is a file. Name a folder.", keys=("out",))
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise RequestError(f"Writing results into {out}: {nearest.name} is a file. Name another folder.", keys=("out",))
    if not os.access(nearest, os.W_OK):
        raise RequestError(
            f"Writing results into {out}: nothing may be written into {nearest}. Name another folder.", keys=("out",)
        )
    others = sorted(path.name for path in out.iterdir() if path.name not in OWN) if out.is_dir() else []
    if others and not (out / POINTS).exists() and not force:
        raise RequestError(
            f"Writing results into {out}: it holds other things ({', '.join(others[:3])}). Name a new folder, or "
            "set force.",
            keys=("out", "force"),
        )


class SavedPoints:
    """Reads what is there, and adds each point as soon as it is measured. Without a folder it remembers nothing."""

    def __init__(self, out: Path | None, work: Mapping[str, Any] | None) -> None:
        self._path = None if out is None else out / POINTS
        self._work = work
        """What the numbers depend on beside the recipe; None where a changed model could not be told."""
        self._known: dict[str, Numbers] = {}
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self._read()

    def find(self, recipe: Recipe) -> Numbers | None:
        """What was measured; None where nothing was. A number that is none is null in the file."""
        known = self._known.get(self._key(recipe)) if self._work is not None else None
        return None if known is None else {**known, **dict.fromkeys(known["broken"], math.nan)}

    def add(self, recipe: Recipe, numbers: Numbers) -> None:
        if self._path is None or self._work is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            broken = [key for key, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)]
            row = plain({"key": self._key(recipe), **numbers, "broken": broken}, strict=True)
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def _key(self, recipe: Recipe) -> str:
        text = json.dumps([recipe.to_yaml(), self._work], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _read(self) -> None:
        assert self._path is not None
        if not self._path.exists():
            return
        try:
            *lines, rest = self._path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"Going on with the sweep in {self._path.parent}: {POINTS} cannot be read ({error}). Remove it, or "
                "name another folder.",
                keys=("out",),
            ) from error
        if rest:  # a run was killed while it wrote; the next point starts on a line of its own
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for number, line in enumerate(lines, start=1):
            try:
                row = checked(SavedPoint, parse_json(line))
                self._known[row.key] = row.model_dump(exclude={"key"})
            except JsonError as error:
                raise CheckpointError(
                    f"Going on with the sweep in {self._path.parent}: line {number} of {POINTS} is no measured point. "
                    "Remove the file, or name another folder.",
                    keys=("out",),
                ) from error


def work_of(
    models: Mapping[str, Checkpoint], data: Any, task: str, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What a number depends on beside the recipe; None where a model or the data is no file."""
    identities = {reference: _identity(checkpoint) for reference, checkpoint in models.items()}
    if None in identities.values() or data is None:
        return None
    own = {}
    if is_custom(task):
        try:
            own["source"] = inspect.getsource(find_function(task))
        except (OSError, TypeError):
            return None  # a function without a source may have changed
    return {
        "isomerge": __version__, "models": identities, "data": [data.sha256, data.kind, data.size], "task": task,
        **own, **settings,
    }  # fmt: skip


def _identity(checkpoint: Checkpoint) -> Any:
    """The weights, and the files beside them that decide what they compute; None where the weights are no files."""
    weights = checkpoint.identity()
    folders = [part.folder for part in checkpoint.parts() if part.folder is not None and part.revision is None]
    beside = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in NOTES]
    return weights and [weights, [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in beside]]
