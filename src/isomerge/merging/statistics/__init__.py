"""Merging with what data showed: Fisher information, Gram matrices, scores, the spread of units."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isomerge.merging.statistics.merging import merge_fisher, merge_regmean
    from isomerge.merging.statistics.moved import moved_grams
    from isomerge.merging.statistics.renormalise import repair
    from isomerge.merging.statistics.soup import Soup, greedy_soup
    from isomerge.merging.statistics.warning import StatisticsWarning

__all__ = ["Soup", "StatisticsWarning", "greedy_soup", "merge_fisher", "merge_regmean", "moved_grams", "repair"]

# Loaded when asked for: the methods use a part of this package, and the rest of it uses the methods.
_HOMES = {
    "Soup": "soup", "greedy_soup": "soup", "merge_fisher": "merging", "merge_regmean": "merging",
    "moved_grams": "moved", "repair": "renormalise", "StatisticsWarning": "warning",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
