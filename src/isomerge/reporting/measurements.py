"""What was measured of models: records that `isomerge eval`, `barrier`, `curve` and `sweep` print, and their forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from isomerge.checkpoint.local import broken_link
from isomerge.errors import RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.reporting.record import Record

PRINTED = "isomerge eval … --json"
BESIDE = ("barrier*.json", "curve*.json", "eval*.json", "sweep*.json")
"""Files beside the weights that are read without being named."""


def read_measurement(path: Path) -> dict[str, Any]:
    """A file that `isomerge eval`, `barrier`, `curve` or `sweep` has printed."""
    act = f"While reading {path}"
    again = f"Make it anew: {PRINTED} > {path}, or with barrier, curve or sweep."
    try:
        record = read_json(path)
    except FileNotFoundError as error:
        why = broken_link(path) if path.is_symlink() else "there is no such file"
        raise RequestError(f"{act}: {why}. Make one: {PRINTED} > {path}, or with barrier, curve or sweep.") from error
    except IsADirectoryError as error:
        raise RequestError(
            f"{act}: it is a folder. Name the JSON file itself; to make one: {PRINTED} > eval.json."
        ) from error
    except OSError as error:
        raise RequestError(f"{act}: it cannot be read ({error.strerror}).") from error
    except JsonError as error:
        raise RequestError(f"{act}: {error}. {again}") from error
    try:
        require_measurement(record)
    except JsonError as error:
        raise RequestError(
            f"{act}: it has no points of a barrier, curve or sweep, and no score ({error}). {again}"
        ) from error
    return dict(record)


def require_measurement(record: Any) -> None:
    """Raise JsonError unless it is what one of the verbs prints."""
    known = dict(record) if isinstance(record, Mapping) else record
    checked(_form(record) if isinstance(record, Mapping) else Curve, known)


def is_measurement(record: Any) -> bool:
    try:
        require_measurement(record)
    except JsonError:
        return False
    return True


def is_plane(record: Record) -> bool:
    return {"x", "y", "loss", "models"} <= record.keys()


def is_score(record: Record) -> bool:
    return {"model", "metric_name"} <= record.keys()


def is_sweep(record: Record) -> bool:
    return {"parameters", "points", "best"} <= record.keys()


def is_trained(record: Record) -> bool:
    return {"method", "straight", "points"} <= record.keys()


def is_line(record: Record) -> bool:
    return _form(record) is Curve


def _form(record: Record) -> type[BaseModel]:
    forms: dict[type[BaseModel], bool] = {
        StoredPlane: is_plane(record),
        Score: is_score(record),
        Swept: is_sweep(record),
        StoredTrained: is_trained(record),
    }
    return next((form for form, fits in forms.items() if fits), Curve)


# --- which models a measurement is about ------------------------------------------------------------------------------
def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model: folders are named from different places.

    >>> same_model("/runs/a", "a"), same_model("runs/a", "other/a"), same_model("a", "b")
    (True, False, False)
    """
    first, second = PurePath(one).parts, PurePath(other).parts
    shorter = min(len(first), len(second))
    return shorter > 0 and first[-shorter:] == second[-shorter:]


def is_about(record: Record, models: Sequence[str]) -> bool:
    """Whether all models of a curve or sweep are among these."""
    return bool(record.get("models")) and all(any(same_model(m, one) for one in models) for m in record["models"])


def data_name(record: Record) -> str | None:
    data = record.get("data")
    return str(data["name"]) if isinstance(data, Mapping) and data.get("name") else None


# --- their forms ------------------------------------------------------------------------------------------------------
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Whose differences and squares are numbers too."""


class LossAndMetric(BaseModel):
    """Loss and metric of one model."""

    loss: Number | None = None
    metric: Number | None = None


class StoredPoint(BaseModel):
    t: Number
    loss: Number | None
    metric: Number | None


class StoredLine(BaseModel):
    """Points of one line."""

    points: list[StoredPoint] = Field(min_length=1)
    barrier: Number | None = None


class AlignedCurve(StoredLine):
    level: str


class Curve(StoredLine):
    """Between two models, and the same after they were aligned, at the same places."""

    models: list[str] | None = None
    metric_name: str | None = None
    higher_is_better: bool | None = None
    ensemble: LossAndMetric | None = None
    aligned: list[AlignedCurve] | AlignedCurve | None = None
    notes: list[str] | None = None
    data: Any = None

    @model_validator(mode="after")
    def _same_places(self) -> Curve:
        several = self.aligned if isinstance(self.aligned, list) else [self.aligned] if self.aligned else []
        if any(len(one.points) != len(self.points) for one in several):
            raise ValueError("the aligned line has another number of points")
        return self


class PerturbedPath(StoredLine):
    perturbed: list[StoredPoint] | None = None

    @model_validator(mode="after")
    def _perturbed_at_the_same_places(self) -> PerturbedPath:
        if self.perturbed is not None and len(self.perturbed) != len(self.points):
            raise ValueError("there is another number of points with perturbed inputs")
        return self


class StoredSamples(BaseModel):
    points: list[LossAndMetric]
    ensemble: LossAndMetric | None = None


class StoredTrained(PerturbedPath):
    """A trained path, and the straight one at the same places."""

    method: str
    straight: PerturbedPath
    models: list[str] | None = None
    level: str | None = None
    metric_name: str | None = None
    ensemble: LossAndMetric | None = None
    samples: StoredSamples | None = None
    training: dict[str, Any] | None = None
    notes: list[str] | None = None
    data: Any = None

    @model_validator(mode="after")
    def _as_many_places(self) -> StoredTrained:
        if len(self.straight.points) != len(self.points):
            raise ValueError("the straight line has another number of points")
        if (self.straight.perturbed is None) != (self.perturbed is None):
            raise ValueError("one of the two paths was not measured with perturbed inputs")
        return self


class Corner(BaseModel):
    model: str
    x: Number
    y: Number
    loss: Number | None


def _rising(values: list[float]) -> list[float]:
    if any(second <= first for first, second in pairwise(values)):
        raise ValueError("the places do not rise")
    return values


Places = Annotated[list[Number], Field(min_length=2), AfterValidator(_rising)]


class StoredPlane(BaseModel):
    """Through three models: the losses of each row of places."""

    x: Places
    y: Places
    loss: list[list[Number | None]]
    models: list[Corner] = Field(min_length=3, max_length=3)
    notes: list[str] | None = None

    @model_validator(mode="after")
    def _one_for_each_place(self) -> StoredPlane:
        if len(self.loss) != len(self.y) or any(len(row) != len(self.x) for row in self.loss):
            raise ValueError("there is not one loss for each place")
        return self


class Score(LossAndMetric):
    """One model on data."""

    model: str
    task: str
    metric_name: str
    higher_is_better: bool
    examples: int | None = None
    data: dict[str, Any] | None = None


class SweptPoint(LossAndMetric):
    parameters: dict[str, Any]


class SweptAxis(BaseModel):
    name: str


class SweepTested(BaseModel):
    best: LossAndMetric


class Swept(BaseModel):
    """A recipe at many values."""

    models: list[str]
    method: str
    parameters: list[SweptAxis]
    metric_name: str | None
    by: str = Field(pattern="^(loss|metric)$")
    points: list[SweptPoint] = Field(min_length=1)
    best: SweptPoint
    test: SweepTested | None = None
    data: dict[str, Any] | None = None
