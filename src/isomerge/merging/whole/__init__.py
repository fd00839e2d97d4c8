"""Whole-model methods: they run the models on data and see all layers at once. One small file each.

A new file with a decorated function is a new method, in recipes, on the command line and in the list of methods.
"""

from __future__ import annotations

import importlib
import pkgutil

from isomerge.merging.methods import METHODS, Method
from isomerge.merging.whole.method import WHOLE, Solved, WholeMethod, Work

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

EVERY: dict[str, Method | WholeMethod] = {**METHODS, **WHOLE}
"""All that `merge_method` may say."""

__all__ = ["EVERY", "WHOLE", "Solved", "WholeMethod", "Work"]
