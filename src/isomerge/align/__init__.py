"""Alignment: one group element per space that brings a model next to another without changing what it computes.

The package is callable: `isomerge.align(source, anchor=…)` is `isomerge.align.api.align`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """`isomerge.align` is both the verb and the folder; Python gives the folder, so the folder answers the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from isomerge.align.api import align

        return align(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
