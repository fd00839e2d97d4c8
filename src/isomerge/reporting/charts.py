"""Lines and maps as SVG that lies inside the page: its colours follow the page's theme, its text stays text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from isomerge.reporting.blocks import figures, known

WIDTH, HEIGHT = 400, 264
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 14, 62
DIGIT = 7.8  # the width of one, in the larger letters of a phone
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
    ends: tuple[float, float] | None = None,
) -> str:
    """Lines over a common axis, which `counts` things or measures. `level` is one more value, drawn from side to side,
    and `ends` are what values lie between, whatever these are. Unknown points leave a gap."""
    lines = [line for line in lines if known(value for _, value in line.points)]
    values = known(value for line in lines for _, value in line.points) + ([level[1]] if level else [])
    places = [place for line in lines for place, _ in line.points]
    if not values:
        return ""
    low, high = ends or (min(values), max(values))
    up = axis_over(ticks_between(low, high), low, high, HEIGHT - BOTTOM, TOP)
    left = max(LEFT, round(8 + DIGIT * max(map(len, up.labels))))
    first, last = min(places), max(places)
    across = axis_over(ticks_between(first, last, whole=counts), first, last, left, WIDTH - RIGHT)
    digits = digits_between(values)
    parts = [_axes(across, up, x)]
    if level:
        parts.append(f'<path class="line level" d="M{left} {up.at(level[1]):.1f}H{WIDTH - RIGHT}"/>')
    for index, line in enumerate(lines):
        parts.append(_path(line, index, across, up, digits))
    names = [line.name for line in lines] + ([level[0]] if level else [])
    legend, rows = _legend(names, has_level=level is not None)
    parts.append(legend)
    described = "; ".join(_described(line, digits) for line in lines)
    described += f"; {level[0]}: {short(level[1], digits)}" if level else ""
    return _svg(title, f"{y} over {x}. {described}.", parts, HEIGHT + 20 * (rows - 1))


def plane_map(title: str, record: dict[str, Any]) -> str:
    """The loss on a grid of places, and where the three models lie. Far-off losses share the strongest tint, or they
    would hide the valley."""
    ends = tinted(record)
    if not ends:
        return ""
    low, high = ends
    span, digits = 1.0 if alike(low, high) else high - low, digits_between(ends)
    highest = max(known(value for row in record["loss"] for value in row))
    xs, ys = record["x"], record["y"]
    step_x, step_y = xs[1] - xs[0], ys[1] - ys[0]
    scale = min((WIDTH - LEFT - RIGHT) / (xs[-1] - xs[0] + step_x), (300) / (ys[-1] - ys[0] + step_y))
    height = scale * (ys[-1] - ys[0] + step_y)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - xs[0] + step_x / 2) * scale, TOP + height - (y - ys[0] + step_y / 2) * scale

    parts = []
    for y, values in zip(ys, record["loss"], strict=True):
        for x, value in zip(xs, values, strict=True):
            left, top = at(x - step_x / 2, y + step_y / 2)
            share = 1.0 if value is None else min(1.0, max(0.0, (value - low) / span))
            tip = f"({x:.3g}, {y:.3g}): loss {'not a number' if value is None else short(value, digits)}"
            parts.append(
                f'<rect class="place" x="{left:.1f}" y="{top:.1f}" width="{step_x * scale + 0.3:.1f}" '
                f'height="{step_y * scale + 0.3:.1f}" style="--v:{share:.3f}" data-tip="{escape(tip)}"/>'
            )
    for letter, model in zip("ABC", record["models"], strict=True):
        x, y = at(model["x"], model["y"])
        tip = f"{letter}, {model['model']}: loss {short(model['loss'], digits)}"
        parts.append(
            f'<g class="model" data-tip="{escape(tip)}"><circle cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{letter}</text></g>'
        )
    tints = f"weakest tint: loss {short(low, digits)}", f"strongest tint: {short(high, digits)} or more"
    for row, text in enumerate(tints, start=1):
        parts.append(f'<text class="name" x="{LEFT}" y="{TOP + height + 2 + 18 * row:.0f}">{text}</text>')
    where = "; ".join(f"{a} has loss {short(m['loss'], digits)}" for a, m in zip("ABC", record["models"], strict=True))
    return _svg(
        title, f"Loss from {short(low, digits)} to {short(highest, digits)}. {where}.", parts, TOP + height + 48
    )


def tinted(record: Mapping[str, Any]) -> tuple[()] | tuple[float, float]:
    """The losses of the weakest and of the strongest tint; nothing where no loss of a plane is a number."""
    losses = sorted(known(value for row in record["loss"] for value in row))
    if not losses:
        return ()
    return losses[0], max([losses[int(0.9 * (len(losses) - 1))], *known(m["loss"] for m in record["models"])])


def _axes(across: ChartAxis, up: ChartAxis, x: str) -> str:
    parts = []
    left = across.start
    for tick, label in zip(up.ticks, up.labels, strict=True):
        top = up.at(tick)
        parts.append(f'<path class="grid" d="M{left} {top:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{left - 7}" y="{top + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(across.ticks, across.labels, strict=True):
        parts.append(f'<text x="{across.at(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
                     f"{label}</text>")  # fmt: skip
    parts.append(f'<path class="axis" d="M{left} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 32}" text-anchor="end">{escape(x)}</text>'
    )
    return "".join(parts)


def _path(line: Line, index: int, across: ChartAxis, up: ChartAxis, digits: int) -> str:
    pieces, pen = [], "M"
    marks = []
    for place, value in line.points:
        if value is None:
            pen = "M"
            continue
        left, top = across.at(place), up.at(value)
        pieces.append(f"{pen}{left:.1f} {top:.1f}")
        pen = "L"
        tip = f"{line.name}, {short(place)}: {short(value, digits)}"
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


def _described(line: Line, digits: int) -> str:
    values = known(value for _, value in line.points)
    first, last, low, high = (short(value, digits) for value in (values[0], values[-1], min(values), max(values)))
    return f"{line.name}: from {first} to {last}, lowest {low}, highest {high}"


def _svg(title: str, description: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}. {escape(description)}">'
        f"{''.join(parts)}</svg>"
    )


# --- axes, and as many digits as the spread of what is shown needs ----------------------------------------------------
def digits_between(values: Iterable[float | None], least: int = 4) -> int:
    """How many significant digits tell these values apart: a hundredth of their spread is still seen.

    >>> digits_between([4.1627, 4.1630]), digits_between([1.0, 5.0])
    (7, 4)
    """
    finite = [value for value in known(values) if math.isfinite(value)]
    if not finite or alike(min(finite), max(finite)):
        return least
    size, spread = max(map(abs, finite)), max(finite) - min(finite)
    return max(least, math.floor(math.log10(size)) - math.floor(math.log10(spread)) + 3)


def alike(low: float, high: float) -> bool:
    """Whether two values differ by no more than rounding."""
    return abs(high - low) <= 1e-8 * max(abs(low), abs(high))


def short(value: float | None, digits: int = 4) -> str:
    """Four digits without zeros at the end; more of them are there to compare, so they stay even."""
    if value is None:
        return "–"
    return f"{value:.4g}" if digits == 4 else figures(value, digits)


@dataclass(frozen=True)
class ChartAxis:
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @property
    def labels(self) -> list[str]:
        """With as few digits as tell every tick as it is, and four at least."""
        close = 1e-3 * min((b - a for a, b in pairwise(self.ticks)), default=math.inf)
        digits = next((d for d in range(4, 16) if all(abs(float(short(t, d)) - t) <= close for t in self.ticks)), 16)
        return [short(t, digits) for t in self.ticks]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def axis_over(ticks: Sequence[float], low: float, high: float, start: float, end: float) -> ChartAxis:
    low, high = min([low, *ticks]), max([high, *ticks])
    if alike(low, high):
        low, high = low - 0.5, high + 0.5
    return ChartAxis(low, high, start, end, tuple(t for t in ticks if low <= t <= high))


def ticks_between(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers that span a range.

    >>> ticks_between(0.0, 1.0)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    if alike(low, high):
        return [low]
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step + 1e-9) * step
    ticks = [first + n * step for n in range(math.ceil((high - first) / step - 1e-9) + 1)]
    places = 2 - math.floor(math.log10(step))
    return [round(t, places) for t in ticks if not whole or low <= t <= high]
