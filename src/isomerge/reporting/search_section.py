"""The section of a search that found a merge: its trace, and the merge beside the models it was made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.charts import Line, line_chart
from isomerge.reporting.record import Record


def search_section(record: Record) -> b.Section | None:
    """None where the model was not found by a search."""
    search = record.get("search")
    if not search:
        return None
    blocks: list[Any] = [b.Paragraph(search["says"])]
    svg = line_chart(
        "The best so far", [Line("best so far", _trace(search))], "merges measured", search["by"],
        level=_best_alone(search), counts=True,
    )  # fmt: skip
    table = _models(search)
    blocks += [b.Side([b.Figure(svg, "The best so far, beside the best model alone", table)])] if svg else [table]
    facts = {
        "algorithm": search["algorithm"], "merges measured": len(search["points"]) + 1,
        "searched on": (search["data"] or {}).get("name"), "tested on": _tested_on(search),
    }  # fmt: skip
    return b.Section("search", "Search", [*blocks, b.FactList(facts)])


def _trace(search: Record) -> list[tuple[float, float | None]]:
    key = search["by"]
    higher = key == "metric" and search.get("higher_is_better") is not False
    best: float | None = None
    line: list[tuple[float, float | None]] = []
    for number, point in enumerate([search["start"], *search["points"]], start=1):
        value = point[key]
        if value is not None and math.isfinite(value):
            best = value if best is None else max(best, value) if higher else min(best, value)
        line.append((number, best))
    return line


def _best_alone(search: Record) -> tuple[str, float] | None:
    key = search["by"]
    known = [one for one in search.get("controls") or () if one[key] is not None and math.isfinite(one[key])]
    if not known:
        return None
    higher = key == "metric" and search.get("higher_is_better") is not False
    best = (max if higher else min)(known, key=lambda one: one[key])
    return f"{best['name']} alone", float(best[key])


def _models(search: Record) -> b.TableBlock:
    """The best merge and every model alone, on the test data where there is some."""
    test = search.get("test")
    rows = [_row("the best merge", test["best"] if test else search["best"])]
    rows += [_row(one["name"], one) for one in (test or search).get("controls") or ()]
    if test:
        rows.insert(1, _row("the recipe before the search", test["start"]))
    where = "the test data, measured once" if test else "the data of the search"
    columns = ("model", "loss", str(search.get("metric_name") or "metric"), "the merge is better by")
    return b.TableBlock(f"On {where}", columns, rows, frozenset({1, 2, 3}))


def _row(name: str, row: Mapping[str, Any]) -> b.Row:
    return b.Row([b.text(name, code=True), *(b.number(row.get(key)) for key in ("loss", "metric", "gain"))])


def _tested_on(search: Record) -> str | None:
    test = search.get("test")
    return None if not test else f"{test['data']['name']}, {test['examples']} examples"
