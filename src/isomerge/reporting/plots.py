"""Curves and maps between models as SVG or PNG, drawn by matplotlib; what a picture needs is asked before the work."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomerge.errors import RequestError
from isomerge.packages import why_not_imported
from isomerge.reporting.record import Record

GREY, BLUE, GREEN = "#8a8f98", "#1f6feb", "#2da44e"


def plot_barrier(record: Record, path: str | Path) -> None:
    """Loss, and beside it the metric where there is one, over t; aligned and not; parents and ensemble."""
    lines = [("as they are", GREY, "-", record["points"])]
    if record.get("aligned"):
        lines.append((f"aligned ({record['aligned']['level']})", BLUE, "-", record["aligned"]["points"]))
    _plot_lines(record, lines, path)


def plot_curve(record: Record, path: str | Path) -> None:
    """The same for a trained path and the straight one, with perturbed inputs too where both were measured so."""
    paths = ("straight", GREY, record["straight"]), (record["method"], BLUE, record)
    lines = [(label, colour, "-", one["points"]) for label, colour, one in paths]
    lines += [
        (f"{label}, perturbed", colour, ":", one["perturbed"]) for label, colour, one in paths if one.get("perturbed")
    ]
    _plot_lines(record, lines, path)


def _plot_lines(record: Record, lines: Sequence[tuple[str, str, str, Sequence[Record]]], path: str | Path) -> None:
    """`lines`: name, colour, style and points of each."""
    panels = [("loss", "loss")]
    if any(point["metric"] is not None for point in record["points"]):
        panels.append(("metric", str(record.get("metric_name") or "metric")))
    figure = new_figure(4.6 * len(panels), 3.4)
    for number, (key, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for label, colour, style, points in lines:
            where = [point["t"] for point in points]
            axes.plot(where, _numbers(p[key] for p in points), style, color=colour, marker="o", ms=3, label=label)
        together = (record.get("ensemble") or {}).get(key)
        if together is not None:
            axes.axhline(together, color=GREEN, lw=1, ls="--", label="ensemble")
        axes.set_xlabel("t, from A to B")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def plot_plane(record: Record, path: str | Path) -> None:
    """The loss as a map, with the three models on it. Far-off losses are cut, or they would hide the valley."""
    losses = [_numbers(row) for row in record["loss"]]
    known = sorted(value for row in losses for value in row if math.isfinite(value))
    if not known:
        raise RequestError(f"Drawing {path}: not one loss on the plane is a number.")
    top = max(known[int(0.9 * (len(known) - 1))], *(m["loss"] for m in record["models"]))
    low = known[0]
    figure = new_figure(5.2, 4.2)
    axes = figure.add_subplot(1, 1, 1)
    levels = [low + (top - low or 1.0) * n / 20 for n in range(21)]
    filled = axes.contourf(record["x"], record["y"], losses, levels=levels, cmap="viridis", extend="max")
    figure.colorbar(filled, ax=axes, label="loss")
    for letter, model in zip("ABC", record["models"], strict=True):
        axes.plot([model["x"]], [model["y"]], "o", color="white", mec="black")
        axes.annotate(letter, (model["x"], model["y"]), xytext=(5, 5), textcoords="offset points", color="white")
    axes.set_aspect("equal")
    save_figure(figure, path)


def _numbers(values: Any) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            f"Drawing a picture: {why_not_imported('matplotlib', error)}.", module="matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """As SVG or PNG, by the file's name. Without a date or random names: the same numbers give the same file."""
    import matplotlib

    path = Path(path)
    if not path.parent.is_dir():
        raise RequestError(f"Drawing {path}: there is no folder {path.parent}. Create it first.")
    with matplotlib.rc_context({"svg.hashsalt": "isomerge", "svg.fonttype": "none"}):
        kind = path.suffix.lower().removeprefix(".")
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


FORMATS = (".svg", ".png")


def why_no_picture() -> str | None:
    """Why nothing can be drawn, and what to do; None where it can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return why_not_imported("matplotlib", error)
    return None


def require_drawable(plot: str | Path) -> None:
    """Refuse, before any work, a picture that could not be written."""
    path = Path(plot)
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"Drawing {path}: pictures are .svg or .png. Name it {path.stem}.svg.")
    if not path.parent.is_dir():
        raise RequestError(f"Drawing {path}: there is no folder {path.parent}. Create it first.")
    if not os.access(path.parent, os.W_OK):
        raise RequestError(f"Drawing {path}: nothing may be written into {path.parent}. Name another folder.")
    if why := why_no_picture():
        raise RequestError(f"Drawing {path}: {why}.", module="matplotlib")
