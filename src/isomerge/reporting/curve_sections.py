"""The sections on what lies between models: the records of `isomerge barrier`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from isomerge.errors import RequestError
from isomerge.json_files import JsonError, checked, read_json
from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, digits_between, line_chart, plane_map, tinted
from isomerge.reporting.record import Record


def read_curve(path: Path) -> dict[str, Any]:
    """A file that `isomerge barrier … --json` has printed, for two models or for three."""
    act = f"While reading {path}"
    try:
        record = read_json(path)
    except FileNotFoundError as error:
        raise RequestError(f"{act}: there is no such file. Make one: isomerge barrier … --json > {path}.") from error
    except IsADirectoryError as error:
        raise RequestError(
            f"{act}: it is a folder. Name the JSON file itself; to make one: isomerge barrier … --json > curve.json."
        ) from error
    except OSError as error:
        raise RequestError(f"{act}: it cannot be read ({error.strerror}).") from error
    except JsonError as error:
        raise RequestError(f"{act}: {error}. Make it anew: isomerge barrier … --json > {path}.") from error
    try:
        require_curve(record)
    except JsonError as error:
        raise RequestError(
            f"{act}: it has no points of a barrier ({error}). Make one: isomerge barrier … --json > {path}."
        ) from error
    return dict(record)


def require_curve(record: Any) -> None:
    """Raise JsonError unless it is what `isomerge barrier` prints."""
    plane = isinstance(record, Mapping) and is_plane(record)
    checked(StoredPlane if plane else Curve, dict(record) if isinstance(record, Mapping) else record)


def is_curve(record: Any) -> bool:
    try:
        require_curve(record)
    except JsonError:
        return False
    return True


def is_plane(record: Record) -> bool:
    return {"x", "y", "loss", "models"} <= record.keys()


Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Whose differences and squares are numbers too."""


class StoredPoint(BaseModel):
    t: Number
    loss: Number | None
    metric: Number | None


class Ensemble(BaseModel):
    loss: Number | None = None
    metric: Number | None = None


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
    ensemble: Ensemble | None = None
    aligned: list[AlignedCurve] | AlignedCurve | None = None
    notes: list[str] | None = None
    data: Any = None

    @model_validator(mode="after")
    def _same_places(self) -> Curve:
        several = self.aligned if isinstance(self.aligned, list) else [self.aligned] if self.aligned else []
        if any(len(one.points) != len(self.points) for one in several):
            raise ValueError("the aligned line has another number of points")
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


def connection_sections(records: Sequence[Record]) -> list[b.Section]:
    """A section for all lines, and one for all planes."""
    lines = [block for record in records if not is_plane(record) for block in _line(record)]
    planes = [block for record in records if is_plane(record) for block in _plane(record)]
    return [b.Section("line", "Between two models", lines), b.Section("plane", "Between three models", planes)]


def _line(record: Record) -> list[Any]:
    aligned = record.get("aligned") or []
    lines = [("as they are", record)]
    lines += [(f"aligned ({one['level']})", one) for one in (aligned if isinstance(aligned, list) else [aligned])]
    metric = str(record.get("metric_name") or "metric")
    ensemble = record.get("ensemble") or {}
    figures = []
    for key, name in (("loss", "loss"), ("metric", metric)):
        level = ("ensemble", ensemble[key]) if ensemble.get(key) is not None else None
        drawn = [Line(label, [(p["t"], p[key]) for p in line["points"]]) for label, line in lines]
        title = f"{name} between the models"
        svg = line_chart(title, drawn, "t, from A to B", name, level=level)
        if svg:
            digits = digits_between(point[key] for _, line in lines for point in line["points"])
            rows = [
                b.Row([b.number(points[0]["t"]), *(b.number(point[key], digits) for point in points)])
                for points in zip(*(line["points"] for _, line in lines), strict=True)
            ]
            numbers = b.TableBlock(title, ("t", *(label for label, _ in lines)), rows, frozenset(range(len(lines) + 1)))
            figures.append(b.Figure(svg, title[0].upper() + title[1:], numbers))
    facts: dict[str, Any] = dict(zip("AB", map(str, record.get("models") or ()), strict=False))
    for label, line in lines:
        facts[f"barrier, {label}"] = b.number(line.get("barrier"), 4).text
    return [b.Side(figures), b.FactList(facts), *([b.Notes(record["notes"])] if record.get("notes") else [])]


def _plane(record: Record) -> list[Any]:
    title = "Loss on the plane through three models"
    digits = digits_between(tinted(record))
    rows = [
        b.Row([b.number(x), b.number(y), b.number(value, digits)])
        for y, row in zip(record["y"], record["loss"], strict=True)
        for x, value in zip(record["x"], row, strict=True)
    ]
    svg = plane_map(title, dict(record))
    facts = {letter: m["model"] for letter, m in zip("ABC", record["models"], strict=False)}
    numbers = b.TableBlock(title, ("x", "y", "loss"), rows, frozenset({0, 1, 2}))
    notes = [b.Notes(record["notes"])] if record.get("notes") else []
    return [b.Side([*([b.Figure(svg, title, numbers)] if svg else []), b.FactList(facts)]), *notes]
