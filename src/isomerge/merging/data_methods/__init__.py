"""Merge methods that run whole models on data, all layers at once. One small file each.

A new file with a decorated function is a new method, in recipes, on the command line and in the list of methods.
"""

from __future__ import annotations

import importlib
import pkgutil

from isomerge.merging.data_methods.method import DATA_METHODS, DataMethod
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods import METHODS, Method

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

ALL_METHODS: dict[str, Method | DataMethod] = {**METHODS, **DATA_METHODS}
"""All that `merge_method` may say."""

__all__ = ["ALL_METHODS", "DATA_METHODS", "DataMethod", "MergeInputs", "MergedWeights"]
