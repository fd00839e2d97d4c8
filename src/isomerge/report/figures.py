"""Lines and maps as SVG that lies inside the page: its colours follow the page's theme, its text stays text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from isomerge.report.blocks import known

WIDTH, HEIGHT = 400, 264
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 14, 62
# Lines differ in dashes and marks too, for those who see no colours and for printers that have none.
DASHES = ("", "6 4", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float | None]]


def line_chart(
    title: str,
    lines: Sequence[Line],
    x: str,
    y: str,
    *,
    level: tuple[str, float] | None = None,
    counts: bool = False,
) -> str:
    """Lines over a common axis, which `counts` things or measures. `level` is one more value, drawn from side to side.
    Unknown points leave a gap."""
    lines = [line for line in lines if known(value for _, value in line.points)]
    values = known(value for line in lines for _, value in line.points) + ([level[1]] if level else [])
    places = [place for line in lines for place, _ in line.points]
    if not values:
        return ""
    ends = min(places), max(places)
    across = _scale(_ticks(*ends, whole=counts), *ends, LEFT, WIDTH - RIGHT)
    marks = _ticks(min(values), max(values))
    up = _scale(marks, min(values), max(values), HEIGHT - BOTTOM, TOP)
    parts = [_axes(across, up, x)]
    if level:
        parts.append(f'<path class="line level" d="M{LEFT} {up.at(level[1]):.1f}H{WIDTH - RIGHT}"/>')
    for index, line in enumerate(lines):
        parts.append(_path(line, index, across, up))
    names = [line.name for line in lines] + ([level[0]] if level else [])
    legend, rows = _legend(names, has_level=level is not None)
    parts.append(legend)
    told = "; ".join(_told(line) for line in lines) + (f"; {level[0]}: {level[1]:.4g}" if level else "")
    return _svg(title, f"{y} over {x}. {told}.", parts, HEIGHT + 20 * (rows - 1))


def plane_map(title: str, record: dict[str, Any]) -> str:
    """The loss on a grid of places, and where the three models lie. Far-off losses share the strongest tint, or they
    would hide the valley."""
    losses = [value for row in record["loss"] for value in row if value is not None]
    if not losses:
        return ""
    low, ordered = min(losses), sorted(losses)
    high = max([ordered[int(0.9 * (len(ordered) - 1))], *known(m["loss"] for m in record["models"])])
    xs, ys = record["x"], record["y"]
    step_x, step_y = xs[1] - xs[0], ys[1] - ys[0]
    scale = min((WIDTH - LEFT - RIGHT) / (xs[-1] - xs[0] + step_x), (300) / (ys[-1] - ys[0] + step_y))
    height = scale * (ys[-1] - ys[0] + step_y)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - xs[0] + step_x / 2) * scale, TOP + height - (y - ys[0] + step_y / 2) * scale

    parts = []
    for y, row in zip(ys, record["loss"], strict=True):
        for x, value in zip(xs, row, strict=True):
            left, top = at(x - step_x / 2, y + step_y / 2)
            share = 1.0 if value is None else min(1.0, max(0.0, (value - low) / (high - low or 1.0)))
            tip = f"({x:.3g}, {y:.3g}): loss {'not a number' if value is None else f'{value:.4g}'}"
            parts.append(
                f'<rect class="place" x="{left:.1f}" y="{top:.1f}" width="{step_x * scale + 0.3:.1f}" '
                f'height="{step_y * scale + 0.3:.1f}" style="--v:{share:.3f}" data-tip="{escape(tip)}"/>'
            )
    for letter, model in zip("ABC", record["models"], strict=True):
        x, y = at(model["x"], model["y"])
        tip = f"{letter}, {model['model']}: loss {_short(model['loss'])}"
        parts.append(
            f'<g class="model" data-tip="{escape(tip)}"><circle cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{letter}</text></g>'
        )
    parts.append(f'<text class="name" x="{LEFT}" y="{TOP + height + 20:.0f}">weakest tint: loss {low:.3g}; '
                 f"strongest: {high:.3g} or more</text>")  # fmt: skip
    where = "; ".join(f"{a} has loss {_short(m['loss'])}" for a, m in zip("ABC", record["models"], strict=True))
    return _svg(title, f"Loss from {low:.4g} to {max(losses):.4g}. {where}.", parts, TOP + height + 30)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _scale(ticks: Sequence[float], low: float, high: float, start: float, end: float) -> _Scale:
    low, high = min([low, *ticks]), max([high, *ticks])
    if high <= low:
        low, high = low - 0.5, high + 0.5
    return _Scale(low, high, start, end, tuple(t for t in ticks if low <= t <= high))


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers that span a range.

    >>> _ticks(0.0, 1.0)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    if span <= 0:
        return [low]
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step + 1e-9) * step
    ticks = [first + n * step for n in range(math.ceil((high - first) / step - 1e-9) + 1)]
    return [round(t, 12) for t in ticks if not whole or low <= t <= high]


def _axes(across: _Scale, up: _Scale, x: str) -> str:
    parts = []
    for tick in up.ticks:
        top = up.at(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {top:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{top + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in across.ticks:
        parts.append(f'<text x="{across.at(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
                     f"{_short(tick)}</text>")  # fmt: skip
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 32}" text-anchor="end">{escape(x)}</text>'
    )
    return "".join(parts)


def _path(line: Line, index: int, across: _Scale, up: _Scale) -> str:
    pieces, pen = [], "M"
    marks = []
    for place, value in line.points:
        if value is None:
            pen = "M"
            continue
        left, top = across.at(place), up.at(value)
        pieces.append(f"{pen}{left:.1f} {top:.1f}")
        pen = "L"
        tip = f"{line.name}, {_short(place)}: {value:.4g}"
        marks.append(f'<g data-tip="{escape(tip)}"><circle class="aim" cx="{left:.1f}" cy="{top:.1f}" r="9"/>'
                     f"{_mark(index, left, top)}</g>")  # fmt: skip
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    drawn = f'<path class="line" d="{"".join(pieces)}"{dashes}/>'
    return f'<g class="series s{index % 4}">{drawn}{"".join(marks)}</g>'


def _mark(index: int, x: float, y: float) -> str:
    kind, r = index % 4, 3.4
    if kind == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if kind == 1:
        return f'<rect class="mark" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    corners = [(0, -1.3), (1.2, 0.9), (-1.2, 0.9)] if kind == 2 else [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)]
    return f'<polygon class="mark" points="{" ".join(f"{x + a * r:.1f},{y + b * r:.1f}" for a, b in corners)}"/>'


def _legend(names: Sequence[str], *, has_level: bool) -> tuple[str, int]:
    """Marks with their names in as many rows as they need, and how many these are."""
    parts, left, row = [], 4.0, 0
    for index, name in enumerate(names):
        text = name if len(name) <= 40 else name[:39] + "…"
        width = 40 + 7.2 * len(text)
        if left + width > WIDTH and left > 4:
            left, row = 4.0, row + 1
        top = HEIGHT - 8 + 20 * row
        kind = "level" if has_level and index == len(names) - 1 else ""
        dash = "" if kind else DASHES[index % len(DASHES)]
        mark = "" if kind else _mark(index, left + 12, top - 4)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<g class="series {kind or f"s{index % 4}"}"><path class="line {kind}" '
                     f'd="M{left:.0f} {top - 4}h24"{dashes}/>{mark}'
                     f'<text x="{left + 30:.0f}" y="{top}">{escape(text)}</text></g>')  # fmt: skip
        left += width
    return "".join(parts), row + 1


def _told(line: Line) -> str:
    values = known(value for _, value in line.points)
    return f"{line.name}: from {values[0]:.4g} to {values[-1]:.4g}, lowest {min(values):.4g}, highest {max(values):.4g}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _svg(title: str, description: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}. {escape(description)}">'
        f"{''.join(parts)}</svg>"
    )
