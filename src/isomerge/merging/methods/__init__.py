"""Merge methods: one small file each. A new file with a decorated function is a new method, everywhere."""

from __future__ import annotations

import importlib
import pkgutil

from isomerge.merging.methods.method import METHODS, Method, Option

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS", "Method", "Option"]
