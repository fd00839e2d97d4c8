"""The sections on what lies between models: the records of `isomerge barrier`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError
from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, digits_between, line_chart, plane_map, tinted
from isomerge.reporting.record import Record


def read_curve(path: Path) -> dict[str, Any]:
    """A file that `isomerge barrier … --json` has printed, for two models or for three."""
    act = f"While reading {path}"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(f"{act}: there is no such file. Make one: isomerge barrier … --json > {path}.") from error
    except IsADirectoryError as error:
        raise RequestError(
            f"{act}: it is a folder. Name the JSON file itself; to make one: isomerge barrier … --json > curve.json."
        ) from error
    except OSError as error:
        raise RequestError(f"{act}: it cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RequestError(
            f"{act}: it is not JSON ({error}). Make it anew: isomerge barrier … --json > {path}."
        ) from error
    if not isinstance(record, dict) or not (is_line(record) or is_plane(record)):
        raise RequestError(f"{act}: it has no points of a barrier. Make one: isomerge barrier … --json > {path}.")
    return record


def is_line(record: Record) -> bool:
    points = record.get("points")
    return isinstance(points, list) and all(isinstance(p, dict) and {"t", "loss", "metric"} <= p.keys() for p in points)


def is_plane(record: Record) -> bool:
    return {"x", "y", "loss", "models"} <= record.keys() and len(record["x"]) > 1 and len(record["y"]) > 1


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
