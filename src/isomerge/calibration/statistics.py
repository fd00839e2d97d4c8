"""What was measured of a model on data, in memory or as one safetensors file.

| tensor | what |
|---|---|
| the name of a tensor of the model | its diagonal Fisher information, so that the file serves as `importance` |
| `gram:WEIGHT`, `sum:WEIGHT` | Σ x xᵀ and Σ x of what a linear map reads |
| `moment:SITE`, `moment_sum:SITE` | Σ x xᵀ and Σ x of the activations at a site (see `isomerge.calibration.sites`) |
| `unit_sum:WEIGHT`, `unit_squares:WEIGHT` | Σ y and Σ y² of what a linear map makes |

All in float64; Gram matrices that were stored in less are read as such. Counts, the model, the data's sha256 and the
settings stand in the file's metadata, as JSON under `isomerge`. Maps that read the same tensor share one matrix, under
the name of the first of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, Field
from torch import Tensor

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.checkpoint.permissions import closed_by, restrict
from isomerge.errors import CheckpointError, RequestError
from isomerge.json_files import JsonError, checked, parse_json

KEY = "isomerge"
PREFIXES = ("gram:", "sum:", "moment:", "moment_sum:", "unit_sum:", "unit_squares:")


@dataclass(frozen=True)
class Gram:
    """The inputs of one linear map over all samples."""

    count: int
    total: Tensor
    product: Tensor
    transposed: bool
    """Its weight is stored as (in, out)."""
    bias: str | None

    @property
    def mean(self) -> Tensor:
        return self.total / max(self.count, 1)

    def shifted(self, by: Tensor) -> Gram:
        """Of x + c."""
        by = by.to(self.total)
        cross = self.total[:, None] * by
        product = self.product + cross + cross.T + self.count * by[:, None] * by
        return replace(self, total=self.total + self.count * by, product=product)

    def scaled(self, by: Tensor) -> Gram:
        """Of c · x, entry by entry."""
        by = by.to(self.total)
        return replace(self, total=self.total * by, product=self.product * by * by[:, None])


@dataclass(frozen=True)
class Statistics:
    """Sums by tensor name; values are read when they are asked for."""

    stored: Checkpoint
    info: Mapping[str, Any] = field(default_factory=dict)
    closed: int = 0
    """The permission bits that a file of it may not have: who may not read the model or the data may not read this."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], info: Mapping[str, Any], closed: int = 0) -> Statistics:
        name = f"the statistics of {info.get('model', 'a model')}"
        return cls(MemoryCheckpoint(name, tensors, {}), dict(info), closed)

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def weights(self) -> list[str]:
        """The linear maps with a Gram matrix."""
        return sorted(self.info.get("maps", {}))

    def to_dict(self) -> dict[str, Any]:
        """What was measured on what, as `isomerge calibrate --json` prints it."""
        keys = ("model", "model_sha256", "data", "source_sha256", "examples", "what")
        return {
            **{key: self.info.get(key) for key in keys},
            "linear_maps": len(self.info.get("maps", {})),
            "sites": len(self.info.get("sites", {})),
            "fisher": self.info.get("fisher"),
            "notes": list(self.info.get("notes", [])),
        }

    def has_gram(self, weight: str) -> bool:
        return weight in self.info.get("maps", {})

    def gram(self, weight: str) -> Gram:
        entry = self._entry("maps", weight, "Gram matrix", "gram")
        owner = entry.get("same", weight)
        total, product = (self.stored.read(kind + owner).to(torch.float64) for kind in ("sum:", "gram:"))
        return Gram(entry["count"], total, product, entry["transposed"], entry.get("bias"))

    def moment(self, site: str) -> tuple[int, Tensor, Tensor]:
        """(count, Σ x, Σ x xᵀ) at a site."""
        entry = self._entry("sites", site, "activations", "activations")
        return entry["count"], self.stored.read("moment_sum:" + site), self.stored.read("moment:" + site)

    def units(self, weight: str) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every output of a linear map."""
        count = self._entry("units", weight, "unit statistics", "units")["count"]
        mean = self.stored.read("unit_sum:" + weight) / count
        squares = self.stored.read("unit_squares:" + weight) / count
        return mean, (squares - mean.square()).clamp_(min=0).sqrt()

    @property
    def fisher(self) -> dict[str, Tensor]:
        """Diagonal Fisher information by tensor name; {} where it was not measured."""
        if "fisher" not in self.info:
            return {}
        return {n: self.stored.read(n) for n in self.stored.tensors if not n.startswith(PREFIXES)}

    def _entry(self, kind: str, name: str, what: str, option: str) -> Any:
        known = self.info.get(kind, {})
        if name not in known:
            raise RequestError(
                f"Looking up the {what} of '{name}' in {self.name}: it was not measured. Measure it with "
                f"calibrate(…, what={{'{option}'}}) on data that reaches it."
            )
        return known[name]

    def save(self, path: str | Path) -> Path:
        """One safetensors file, written aside and renamed."""
        from safetensors.torch import save_file

        path = Path(path)
        aside = path.with_name(path.name + ".part")
        tensors = {name: self.stored.read(name).contiguous() for name in self.stored.tensors}
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.touch()
            restrict(aside, self.closed)
            save_file(tensors, aside, metadata={"format": "pt", KEY: json.dumps(self.info, sort_keys=True)})
            restrict(aside, self.closed)  # the library may have made the file anew
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        return path


def _counted(entry: Measured) -> Measured:
    if entry.count < 1:
        raise ValueError("nothing was counted")
    return entry


def open_statistics(source: str | Path | Statistics) -> Statistics:
    """A file that `Statistics.save` wrote, by its header; matrices are read when they are asked for."""
    if isinstance(source, Statistics):
        return source
    from safetensors import SafetensorError, safe_open

    stored = open_checkpoint(source)
    try:
        with safe_open(source, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"While opening the statistics {source}: {error}. Name the file that calibrate wrote."
        ) from error
    if text is None:
        raise CheckpointError(
            f"While opening the statistics {source}: the file does not say what was measured. It is a model or another "
            "tool's file; name one that `isomerge calibrate` wrote."
        )
    try:
        info = parse_json(text)
        _require_complete(checked(StatisticsInfo, info), stored)
    except JsonError as error:
        raise CheckpointError(
            f"While opening the statistics {source}: {error}. The file is damaged; measure again with calibrate."
        ) from error
    return Statistics(stored, info, closed_by([], [Path(source)]))


class Measured(BaseModel):
    """Of a site or of the units of a map."""

    count: int = Field(ge=0)


class MeasuredMap(Measured):
    transposed: bool
    bias: str | None = None
    same: str | None = None
    """The map that shares its matrix."""


class StatisticsInfo(BaseModel):
    """What the metadata of a file says of its tensors."""

    maps: dict[str, MeasuredMap] = {}
    sites: dict[str, Measured] = {}
    units: dict[str, Annotated[Measured, AfterValidator(_counted)]] = {}
    notes: list[str] = []
    what: list[str] | None = None
    model: str | None = None
    data: str | None = None
    examples: int | None = None


def _require_complete(info: StatisticsInfo, stored: Checkpoint) -> None:
    """Everything that is listed is there, in shapes that belong together."""
    owners = {entry.same or name for name, entry in info.maps.items()}
    pairs = [("sum:" + name, "gram:" + name, True) for name in owners]
    pairs += [("moment_sum:" + name, "moment:" + name, True) for name in info.sites]
    pairs += [("unit_sum:" + name, "unit_squares:" + name, False) for name in info.units]
    for first, second, squared in pairs:
        shapes = [stored.tensors[name].shape if name in stored.tensors else None for name in (first, second)]
        if shapes[0] is None or len(shapes[0]) != 1 or shapes[1] != shapes[0] * (2 if squared else 1):
            raise JsonError(f"'{first}' and '{second}' have the shapes {shapes[0]} and {shapes[1]}")
