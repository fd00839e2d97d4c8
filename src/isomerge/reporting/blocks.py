"""What a report is made of: sections of blocks, each plain data that one macro of the template shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A value as it is shown, and as it is sorted."""

    text: str
    value: float | str | None = None
    bar: float | None = None
    """A share between 0 and 1, drawn beside the text."""
    code: bool = False


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell]
    layer: int | None = None
    """What the layer filter goes by; None: the row always stays."""
    quiet: bool = False
    """There to compare with: its bars stand back."""


@dataclass(frozen=True)
class TableBlock:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    numeric: frozenset[int] = frozenset()
    """The places of columns that hold numbers."""
    wide: bool = False
    """The bars are what the table is there for."""
    text: frozenset[int] = frozenset()
    """The places of columns that hold running text, which needs room."""
    shows: str = "table"


@dataclass(frozen=True)
class Heat:
    """A table whose cells are tinted by their value; the number stands in every cell."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[float | None]]]
    """Label, layer and one value per column."""
    top: float
    """The value of the strongest tint, so that two maps can share a scale."""
    shows: str = "heat"

    def tint(self, value: float | None) -> float:
        return 0.0 if value is None or self.top <= 0 else round(min(1.0, max(0.0, value / self.top)), 3)


@dataclass(frozen=True)
class FactList:
    """Names and values; a value that is None is left out."""

    items: Mapping[str, Any]
    shows: str = "facts"


@dataclass(frozen=True)
class Paragraph:
    text: str
    shows: str = "words"


@dataclass(frozen=True)
class Notes:
    items: Sequence[str]
    shows: str = "notes"


@dataclass(frozen=True)
class Code:
    text: str
    label: str
    shows: str = "code"


@dataclass(frozen=True)
class Figure:
    """A drawing, with its numbers below it for those who cannot see it."""

    svg: str
    caption: str
    numbers: TableBlock
    shows: str = "figure"


@dataclass(frozen=True)
class Side:
    """Blocks beside each other where the page is wide enough."""

    blocks: Sequence[Any]
    shows: str = "side"


@dataclass(frozen=True)
class Foldable:
    """Blocks that can be folded away."""

    label: str
    blocks: Sequence[Any]
    open: bool = False
    shows: str = "fold"


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: Sequence[Any] = field(default_factory=list)


def number(value: float | None, digits: int = 3) -> Cell:
    """Significant digits, or a dash.

    >>> number(0.012345).text, number(None).text
    ('0.0123', '–')
    """
    if value is None or not math.isfinite(value):
        return Cell("–")
    return Cell(figures(value, digits), value)


def figures(value: float, digits: int = 3) -> str:
    """Always so many significant digits, so that columns stay even.

    >>> figures(1.4), figures(100.0), figures(0.0), figures(12345678.0)
    ('1.40', '100', '0', '1.23e+07')
    """
    return f"{value:#.{digits}g}".rstrip(".") if value else "0"


def count(value: int | None) -> Cell:
    return Cell("–") if value is None else Cell(f"{value:,}".replace(",", "\u202f"), value)


def percent(value: float | None, *, bar: bool = True) -> Cell:
    """A fraction as a percentage with a bar.

    >>> percent(0.5)
    Cell(text='50.0 %', value=0.5, bar=0.5, code=False)
    """
    if value is None or not math.isfinite(value):
        return Cell("–")
    return Cell(f"{100 * value:.1f} %", value, max(0.0, min(1.0, value)) if bar else None)


def text(value: Any, *, code: bool = False) -> Cell:
    text = "–" if value is None or value == "" else str(value)
    return Cell(text, text, code=code)


def heats(captions: Sequence[str], grids: Sequence[Mapping[tuple[str, int, str], float | None]]) -> list[Heat]:
    """One map for each grid of (row label, layer, column) → value, all with the same rows, columns and scale."""
    keys = list(dict.fromkeys(key for grid in grids for key in grid))
    columns = list(dict.fromkeys(column for _, _, column in keys))
    labels = list(dict.fromkeys((label, layer) for label, layer, _ in keys))
    top = max((value for grid in grids for value in grid.values() if value is not None), default=0.0)
    return [
        Heat(
            caption,
            columns,
            [(label, layer, [grid.get((label, layer, column)) for column in columns]) for label, layer in labels],
            top,
        )
        for caption, grid in zip(captions, grids, strict=True)
    ]


def layers_of(blocks: Iterable[Any]) -> Iterator[int]:
    """The layers of all rows, in folded blocks and below figures too; rows outside the layers have none."""
    for block in blocks:
        if isinstance(block, TableBlock):
            yield from (row.layer for row in block.rows if row.layer is not None and row.layer >= 0)
        elif isinstance(block, Heat):
            yield from (layer for _, layer, _ in block.rows if layer >= 0)
        elif isinstance(block, Figure):
            yield from layers_of([block.numbers])
        elif isinstance(block, (Side, Foldable)):
            yield from layers_of(block.blocks)


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are known."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else None
