"""A sweep as a picture: a curve over one parameter, a map over two, the best so far over more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomerge.reporting.plots import BLUE, GREEN, GREY, new_figure, save_figure
from isomerge.reporting.record import Record
from isomerge.sweeping.points import word

LONGEST, TICKS = 20, 12  # letters of a label, and labels of an axis


def plot_sweep(record: Record, path: Path) -> None:
    """One panel for the loss and one for the metric, as far as they were measured."""
    titles = {"loss": "loss", "metric": str(record.get("metric_name") or "metric")}
    panels = [key for key in titles if any(point[key] is not None for point in record["points"])]
    figure = new_figure(4.8 * max(1, len(panels)), 3.6)
    names = [axis["name"] for axis in record["parameters"]]
    draw = _curve if len(names) == 1 or record["mode"] == "together" else _map if len(names) == 2 else _best_so_far
    if not all(_has_place(point["parameters"].get(name)) for point in record["points"] for name in names):
        draw = _best_so_far
    for number, key in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        axes.set_title(titles[key])
        draw(figure, axes, record, names, key)
    save_figure(figure, path)


def _curve(figure: Any, axes: Any, record: Record, names: Sequence[str], key: str) -> None:
    name = names[0]
    points = [point for point in record["points"] if name in point["parameters"]]
    where, labels = _places([point["parameters"][name] for point in points])
    order = sorted(range(len(points)), key=lambda n: where[n])
    line = "o" if labels else "o-"
    axes.plot([where[n] for n in order], [_number(points[n][key]) for n in order], line, color=BLUE, ms=4)
    best = record["best"]
    if name in best["parameters"]:
        at = next(n for n, point in enumerate(points) if point["parameters"] == best["parameters"])
        axes.plot([where[at]], [_number(best[key])], "o", color=GREEN, ms=8, label=f"best by {record['by']}")
    if record.get("start"):
        axes.axhline(_number(record["start"][key]), color=GREY, lw=1, ls="--", label="the recipe as it is")
    if labels:
        _label(axes.xaxis, labels)
    axes.set_xlabel(", ".join(names) if record["mode"] == "together" else name)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _map(figure: Any, axes: Any, record: Record, names: Sequence[str], key: str) -> None:
    points = [point for point in record["points"] if point["parameters"]]
    sides = [_places([point["parameters"][name] for point in points]) for name in names]
    (x, x_labels), (y, y_labels) = sides
    values = [_number(point[key]) for point in points]
    colours = "viridis_r" if key == "loss" or not record.get("higher_is_better", True) else "viridis"
    columns, rows = sorted(set(x)), sorted(set(y))
    if record["mode"] == "grid":
        cells = [[math.nan] * len(columns) for _ in rows]
        for a, b, value in zip(x, y, values, strict=True):
            cells[rows.index(b)][columns.index(a)] = value
        shown = axes.imshow(cells, origin="lower", aspect="auto", cmap=colours)
        _label(axes.xaxis, x_labels or [word(c) for c in columns])
        _label(axes.yaxis, y_labels or [word(r) for r in rows])
        x, y = [columns.index(a) for a in x], [rows.index(b) for b in y]
    else:
        shown = axes.scatter(x, y, c=values, cmap=colours)
    figure.colorbar(shown, ax=axes)
    best = record["best"]["parameters"]
    at = next((n for n, point in enumerate(points) if point["parameters"] == best), None)
    if at is not None:
        axes.plot([x[at]], [y[at]], "o", mfc="none", mec="red", ms=12, mew=2)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])


def _best_so_far(figure: Any, axes: Any, record: Record, names: Sequence[str], key: str) -> None:
    values = [_number(point[key]) for point in record["points"]]
    lower = key == "loss" or not record.get("higher_is_better", True)
    best, line = math.nan, []
    for value in values:
        better = math.isnan(best) or (value < best if lower else value > best)
        best = value if better else best
        line.append(best)
    count = range(1, len(values) + 1)
    axes.plot(count, values, "o", color=GREY, ms=3, label="measured")
    axes.step(count, line, where="post", color=BLUE, label="best so far")
    axes.set_xlabel("point")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def _has_place(value: Any) -> bool:
    """Not a gradient, nor an option that the method of a point does not have."""
    return value is not None and not isinstance(value, list)


def _places(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Numbers where they are; words one after the other, with their labels."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values], []
    known = list(dict.fromkeys(word(value) for value in values))
    return [float(known.index(word(value))) for value in values], known


def _label(axis: Any, labels: Sequence[str]) -> None:
    """Names at their places: of many, some; of long ones such as paths, the end."""
    places = range(0, len(labels), math.ceil(len(labels) / TICKS))
    shown = [labels[n] if len(labels[n]) <= LONGEST else f"…{labels[n][-LONGEST:]}" for n in places]
    slanted = {"rotation": 30, "ha": "right"} if axis.axis_name == "x" and sum(map(len, shown)) > 2 * LONGEST else {}
    axis.set_ticks(list(places), shown, fontsize=8, **slanted)


def _number(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else float(value)
