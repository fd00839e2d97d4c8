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
    explained: str = ""
    """The caption in plain words."""
    shows: str = "table"


@dataclass(frozen=True)
class HeatCell:
    """A value, the one before it where there is one, and how strongly it is tinted."""

    value: float
    before: float | None
    tint: float
    """Of a value its share of the strongest; of a change the change itself, between −1 and 1."""

    @property
    def change(self) -> str | None:
        """In percent, as a difference that is seen at once."""
        if self.before is None:
            return None
        share = 100 * (self.value - self.before) / self.before if self.before else 0.0
        return f"{share:+.0f}\u202f%".replace("-", "−").replace("+0\u202f", "±0\u202f").replace("−0\u202f", "±0\u202f")


@dataclass(frozen=True)
class Heat:
    """A table whose cells are tinted: by their change where there is a value before, else by the value."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[HeatCell | None]]]
    """Label, layer and one cell per column."""
    ends: tuple[str, ...]
    """What the scale says: at nothing and at the strongest tint; of changes at both ends and in the middle."""
    explained: str = ""
    shows: str = "heat"


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
    numbers: TableBlock | None = None
    """None where the drawing's own words say all there is."""
    explained: str = ""
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


Grid = Mapping[tuple[str, int, str], float | None]
"""(row label, layer, column) → value"""
CHANGES = ("−100\u202f%", "unchanged", "+100\u202f%")


def heat(
    caption: str, before: Grid, after: Grid, *, top: float, ends: tuple[str, str], explained: str = ""
) -> Heat | None:
    """One map of all values; `top` has the strongest tint unless there are values before, and `ends` name the scale."""
    keys = [key for key in dict.fromkeys([*before, *after]) if known([before.get(key), after.get(key)])]
    if not keys:
        return None
    columns = list(dict.fromkeys(column for _, _, column in keys))
    labels = list(dict.fromkeys((label, layer) for label, layer, _ in keys))
    compared = any(before.get(key) is not None and after.get(key) is not None for key in keys)

    def cell(key: tuple[str, int, str]) -> HeatCell | None:
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            value = old if new is None else new
            return None if value is None else HeatCell(value, None, 0.0 if compared else min(1.0, value / top))
        return HeatCell(new, old, max(-1.0, min(1.0, (new - old) / old if old else 0.0)))

    rows = [(label, layer, [cell((label, layer, column)) for column in columns]) for label, layer in labels]
    return Heat(caption, columns, rows, CHANGES if compared else ends, explained)


def layers_of(blocks: Iterable[Any]) -> Iterator[int]:
    """The layers of all rows, in folded blocks and below figures too; rows outside the layers have none."""
    for block in blocks:
        if isinstance(block, TableBlock):
            yield from (row.layer for row in block.rows if row.layer is not None and row.layer >= 0)
        elif isinstance(block, Heat):
            yield from (layer for _, layer, _ in block.rows if layer >= 0)
        elif isinstance(block, Figure) and block.numbers is not None:
            yield from layers_of([block.numbers])
        elif isinstance(block, (Side, Foldable)):
            yield from layers_of(block.blocks)


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are known."""
    numbers = known(values)
    return sum(numbers) / len(numbers) if numbers else None
