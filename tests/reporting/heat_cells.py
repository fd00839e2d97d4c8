"""The cells of a heat map as a page writes them: "1.42 → 1.04−27 %"."""

from __future__ import annotations

import re

CELL = re.compile(r"([\d.e+-]+)\s*→\s*([\d.e-]+?)\s*([+−±]\d+)\u202f%")


def cell_numbers(text: str) -> tuple[float, float, float]:
    """Before, after, and the change in percent."""
    found = CELL.fullmatch(text.strip())
    assert found, text
    before, after, change = found.groups()
    return float(before), float(after), float(re.sub("[±+]", "", change).replace("−", "-"))
