"""Results in a notebook: the tables of the terminal as HTML, with every text escaped."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isomerge.reporting.terminal import facts_table
from isomerge.text import all_visible

# Loaded by name when a result is shown: most of the tables belong to the verbs.
TABLES = {
    "AlignmentReport": "isomerge.reporting.terminal:align_table",
    "FamilyReport": "isomerge.reporting.terminal:align_table",
    "MergeReport": "isomerge.reporting.terminal:merge_table",
    "MergePlan": "isomerge.reporting.terminal:plan_table",
    "SelftestReport": "isomerge.reporting.terminal:selftest_table",
    "DemoResult": "isomerge.reporting.terminal:demo_table",
    "CheckResult": "isomerge.cli.check:short_table",
    "Evaluation": "isomerge.cli.eval:eval_table",
    "EnsembleEvaluation": "isomerge.cli.ensemble:ensemble_table",
    "GeneratedTexts": "isomerge.cli.ensemble:texts_table",
    "Barrier": "isomerge.cli.barrier:barrier_table",
    "Plane": "isomerge.cli.barrier:plane_table",
    "TrainedCurve": "isomerge.cli.curve:curve_table",
    "Description": "isomerge.cli.describe:description_table",
    "Found": "isomerge.cli.find:find_table",
    "Sweep": "isomerge.cli.sweep:sweep_table",
    "Verification": "isomerge.cli.verify:verify_table",
    "Reproduction": "isomerge.cli.reproduce:reproduce_table",
}
"""By the class of the result; others are shown field by field."""
BORDER = "border-collapse:collapse;margin:.4em 0"


def result_html(record: Mapping[str, Any], kind: str) -> str:
    """What a notebook shows of a result of this class.

    >>> "&lt;a&gt;" in result_html({"model": "<a>", "loss": 0.5}, "SweepPoint")
    True
    """
    return "".join(_blocks(_table(kind)(all_visible({"notes": [], **record}))))


def _table(kind: str) -> Callable[[dict[str, Any]], RenderableType]:
    if kind not in TABLES:
        return facts_table
    module, _, name = TABLES[kind].partition(":")
    found: Callable[[dict[str, Any]], RenderableType] = getattr(importlib.import_module(module), name)
    return found


def _blocks(shown: RenderableType) -> Iterator[str]:
    if isinstance(shown, Group):
        for part in shown.renderables:
            yield from _blocks(part)
    elif isinstance(shown, Table):
        yield "".join(_rows(shown))
    else:
        yield f"<div>{_escaped(shown)}</div>"


def _rows(table: Table) -> Iterator[str]:
    title = f"<caption>{_escaped(table.title)}</caption>" if table.title else ""
    yield f'<table style="{BORDER}">{title}'
    sides = [column.justify if column.justify in ("left", "right") else "left" for column in table.columns]
    if table.show_header:
        yield _row("th", sides, [column.header for column in table.columns])
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield _row("td", sides, cells)
    yield "</table>"


def _row(tag: str, sides: Sequence[str], cells: Any) -> str:
    both = zip(sides, cells, strict=True)
    return (
        "<tr>" + "".join(f'<{tag} style="text-align:{side}">{_escaped(cell)}</{tag}>' for side, cell in both) + "</tr>"
    )


def _escaped(cell: RenderableType) -> str:
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))
