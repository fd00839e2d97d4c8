"""The sections on what was measured: scores, sweeps, and what lies between models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, digits_between, line_chart, plane_map, tinted
from isomerge.reporting.measurements import data_name, is_line, is_plane, is_score, is_sweep, is_trained
from isomerge.reporting.quality import aligned_lines
from isomerge.reporting.record import Record


def score_section(records: Sequence[Record]) -> b.Section:
    """All scores in one table, and every sweep."""
    rows = [
        b.Row([b.text(one["model"], code=True), b.text(data_name(one)), b.text(one["metric_name"]),
               b.number(one.get("metric"), 4), b.number(one.get("loss"), 4), b.count(one.get("examples"))])
        for one in records
        if is_score(one)
    ]  # fmt: skip
    columns = ("model", "data", "metric", "value", "loss", "examples")
    scores = [b.TableBlock("Scores of models on data", columns, rows, frozenset({3, 4, 5}))] if rows else []
    return b.Section("scores", "Scores", [*scores, *(_sweep(one) for one in records if is_sweep(one))])


def _sweep(record: Record) -> b.TableBlock:
    names = [axis["name"] for axis in record["parameters"]]
    rows = [
        b.Row([*(b.text(point["parameters"].get(name)) for name in names), b.number(point.get("loss"), 4),
               b.number(point.get("metric"), 4), b.text("best" if point == record["best"] else " ")])
        for point in record["points"]
    ]  # fmt: skip
    where = f" on {data}" if (data := data_name(record)) else ""
    title = f"Sweep of {record['method']} over {', '.join(names)}{where}"
    columns = (*names, "loss", record.get("metric_name") or "metric", " ")
    return b.TableBlock(title, columns, rows, frozenset({len(names), len(names) + 1}))


def connection_sections(records: Sequence[Record]) -> list[b.Section]:
    """A section for all lines, one for all trained paths, and one for all planes."""
    lines = [block for record in records if is_line(record) for block in _line(record)]
    trained = [block for record in records if is_trained(record) for block in _trained(record)]
    planes = [block for record in records if is_plane(record) for block in _plane(record)]
    return [
        b.Section("line", "Between two models", lines),
        b.Section("curve", "Trained paths between two models", trained),
        b.Section("plane", "Between three models", planes),
    ]


def _line(record: Record) -> list[Any]:
    lines = [("as they are", record), *((f"aligned ({one['level']})", one) for one in aligned_lines(record))]
    facts = _ends(record)
    for label, line in lines:
        facts[f"barrier, {label}"] = b.number(line.get("barrier"), 4).text
    drawn = [(label, line["points"]) for label, line in lines]
    return [b.Side(_figures(record, drawn, "between the models")), b.FactList(facts), *_notes(record)]


def _trained(record: Record) -> list[Any]:
    """A trained path beside the straight one, and with perturbed inputs where it was measured so."""
    paths = [("straight", record["straight"]), (record["method"], record)]
    drawn = [(label, path["points"]) for label, path in paths]
    drawn += [(f"{label}, perturbed", path["perturbed"]) for label, path in paths if path.get("perturbed")]
    facts = _ends(record)
    if record.get("level"):
        facts["B was aligned to A"] = record["level"]
    for label, path in paths:
        facts[f"barrier, {label}"] = b.number(path.get("barrier"), 4).text
    if samples := record.get("samples"):
        losses = [one["loss"] for one in samples["points"] if one.get("loss") is not None]
        facts[f"loss of {len(samples['points'])} samples"] = b.number(
            sum(losses) / len(losses) if losses else None, 4
        ).text
        facts["loss of their ensemble"] = b.number((samples.get("ensemble") or {}).get("loss"), 4).text
    return [b.Side(_figures(record, drawn, f"on the {record['method']} path")), b.FactList(facts), *_notes(record)]


def _figures(record: Record, lines: Sequence[tuple[str, Sequence[Record]]], where: str) -> list[b.Figure]:
    """Loss, and the metric where there is one, over t."""
    metric = str(record.get("metric_name") or "metric")
    ensemble = record.get("ensemble") or {}
    figures = []
    for key, name in (("loss", "loss"), ("metric", metric)):
        level = ("ensemble", ensemble[key]) if ensemble.get(key) is not None else None
        drawn = [Line(label, [(p["t"], p[key]) for p in points]) for label, points in lines]
        title = f"{name} {where}"
        svg = line_chart(title, drawn, "t, from A to B", name, level=level)
        if svg:
            digits = digits_between(point[key] for _, points in lines for point in points)
            rows = [
                b.Row([b.number(row[0]["t"]), *(b.number(point[key], digits) for point in row)])
                for row in zip(*(points for _, points in lines), strict=True)
            ]
            numbers = b.TableBlock(title, ("t", *(label for label, _ in lines)), rows, frozenset(range(len(lines) + 1)))
            figures.append(b.Figure(svg, title[0].upper() + title[1:], numbers))
    return figures


def _ends(record: Record) -> dict[str, Any]:
    return dict(zip("AB", map(str, record.get("models") or ()), strict=False))


def _notes(record: Record) -> list[b.Notes]:
    return [b.Notes(record["notes"])] if record.get("notes") else []


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
    return [b.Side([*([b.Figure(svg, title, numbers)] if svg else []), b.FactList(facts)]), *_notes(record)]
