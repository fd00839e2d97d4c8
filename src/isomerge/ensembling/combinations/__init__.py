"""Ways to combine predictions: one small file each. A new file with a decorated function is a new way, everywhere."""

from __future__ import annotations

import importlib
import pkgutil

from isomerge.ensembling.combinations.combination import COMBINATIONS, Combination, Shares, Stack

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["COMBINATIONS", "Combination", "Shares", "Stack"]
