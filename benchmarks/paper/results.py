"""What a script hands back: tables, plots and sentences, as plain values that go to JSON and come back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Number = float | None


@dataclass(frozen=True)
class Mean:
    """Prints the mean and, of several values, ± the standard error s/√n with s² the unbiased variance.

    >>> str(Mean([1.0, 2.0, 4.5], digits=2)), str(Mean([3.0], unit=" %")), str(Mean([]))
    ('2.50 ± 1.04', '3.0 %', '–')
    """

    values: Sequence[Number]
    digits: int = 1
    unit: str = ""

    @property
    def known(self) -> list[float]:
        return [float(value) for value in self.values if value is not None and math.isfinite(value)]

    @property
    def mean(self) -> float:
        """NaN where nothing is known, so that a missing number never compares as better or worse."""
        return statistics.mean(self.known) if self.known else math.nan

    @property
    def error(self) -> float:
        return statistics.stdev(self.known) / math.sqrt(len(self.known)) if len(self.known) > 1 else 0.0

    def __str__(self) -> str:
        if not self.known:
            return "–"
        spread = f" ± {self.error:.{self.digits}f}" if len(self.known) > 1 else ""
        return f"{self.mean:.{self.digits}f}{spread}{self.unit}"


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str | Mean]]


@dataclass
class Plot:
    """Lines over `ticks` (numbers), or groups of bars (`ticks` are their names); one entry of `series` each."""

    title: str
    ticks: Sequence[float] | Sequence[str]
    series: Mapping[str, Sequence[Number]]
    x: str = ""
    y: str = ""
    kind: str = "lines"
    """ "lines" or "bars"."""
    errors: Mapping[str, Sequence[Number]] = field(default_factory=dict)
    """Standard errors, by series."""
    log: bool = False


@dataclass
class Map:
    """Values over a plane, `values[y][x]`, with named places marked on it."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[Number]]
    marks: Sequence[tuple[str, float, float]]
    label: str = "loss"
    kind: str = "map"


@dataclass
class Result:
    tables: list[Table]
    plots: list[Plot | Map] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    """Whole sentences with numbers: what held here and what did not."""


def to_json(result: Result) -> dict[str, Any]:
    found = asdict(result)
    for table, plain in zip(result.tables, found["tables"], strict=True):
        plain["rows"] = [[asdict(cell) if isinstance(cell, Mean) else cell for cell in row] for row in table.rows]
    return finite(found)  # type: ignore[no-any-return]


def from_json(record: Mapping[str, Any]) -> Result:
    tables = [
        Table(t["title"], t["columns"], [[c if isinstance(c, str) else Mean(**c) for c in row] for row in t["rows"]])
        for t in record["tables"]
    ]
    plots: list[Plot | Map] = [Map(**p) if p["kind"] == "map" else Plot(**p) for p in record["plots"]]
    return Result(tables, plots, list(record["claims"]))


def finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: both become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
