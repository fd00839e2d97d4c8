"""The table of which units moved where: one row per space, its most moved units by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.reporting import blocks as b
from isomerge.reporting.units import LISTED

Record = Mapping[str, Any]
SPACE = "\u00a0"  # keeps a unit on one line


def units_table(model: str, anchor: str, spaces: Sequence[Record]) -> b.Table:
    """`spaces` are rows of the record, each with its layer; those that stay are left out."""
    rows = [
        b.Row([b.words(row["name"], code=True), _count(row["units"]),
               b.Cell(_units(row["units"], row["kind"]))], row["layer"])
        for row in spaces
        if (row.get("units") or {}).get("changed")
    ]  # fmt: skip
    caption = (
        f"Which units of {model} moved: from their place in {model} to that in {anchor}, the farthest first, at most "
        f"{LISTED} of a space. An angle is how far vectors are turned in the mean (90° by a random rotation), × how "
        "much they are stretched"
    )
    return b.Table(caption, ("space", "changed", "from → to"), rows, frozenset({1}), text=frozenset({2}))


def _count(units: Record) -> b.Cell:
    return b.Cell(
        f"{b.count(units['changed']).text} of {b.count(units['of']).text}".replace(" ", SPACE), units["changed"]
    )


def _units(units: Record, kind: str) -> str:
    own = kind.rpartition(".")[2]
    listed = [unit_words(entry, units["names"], own) for entry in units["listed"]]
    more = units["changed"] - len(listed)
    return f"{SPACE}· ".join([*listed, *([f"and {b.count(more).text} more".replace(" ", SPACE)] if more else [])])


def unit_words(entry: Record, names: Sequence[str], own: str = "") -> str:
    """One unit in words; where they are those of the space itself (`own`), what they are need not be said.

    >>> print(unit_words({"from": 2, "to": 0, "angle": 37.2, "factor": 1.13}, ["head"], "qk").replace(SPACE, " "))
    head 2 → 0: 37.2°, × 1.13
    >>> entry = {"from": 5, "to": 1, "within": [3], "flipped": True}
    >>> print(unit_words(entry, ["expert", "ffn"], "ffn").replace(SPACE, " "))
    expert 3, 5 → 1: sign
    >>> unit_words({"angle": 90.0}, [])
    '90.0°'
    """
    done = []
    if entry.get("flipped"):
        done.append("sign")
    if entry.get("angle") is not None:
        done.append(f"{b.figures(entry['angle'])}°")
    if entry.get("factor") is not None:
        done.append(f"× {b.figures(entry['factor'])}".replace("-", "−"))
    outer = [f"{name} {number}" for name, number in zip(names, entry.get("within") or (), strict=False)]
    place = []
    if "to" in entry:
        kind = "" if names[-1] == own else f"{names[-1]} "
        place = [f"{kind}{entry['from']} → {entry['to']}" if entry["from"] != entry["to"] else f"{kind}{entry['to']}"]
    where = ", ".join([*outer, *place])
    return ": ".join(part for part in (where, ", ".join(done)) if part).replace(" ", SPACE)
