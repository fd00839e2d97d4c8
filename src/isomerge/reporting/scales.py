"""How numbers are told apart: the ticks of an axis, and as many digits as the spread of what is shown needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from isomerge.reporting.blocks import figures, known


def digits_between(values: Iterable[float | None], least: int = 4) -> int:
    """How many significant digits tell these values apart: a hundredth of their spread is still seen.

    >>> digits_between([4.1627, 4.1630]), digits_between([1.0, 5.0])
    (7, 4)
    """
    found = [value for value in known(values) if math.isfinite(value)]
    if not found or alike(min(found), max(found)):
        return least
    size, spread = max(map(abs, found)), max(found) - min(found)
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
class Scale:
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


def scale(ticks: Sequence[float], low: float, high: float, start: float, end: float) -> Scale:
    low, high = min([low, *ticks]), max([high, *ticks])
    if alike(low, high):
        low, high = low - 0.5, high + 0.5
    return Scale(low, high, start, end, tuple(t for t in ticks if low <= t <= high))


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
