"""Merging: one output tensor at a time, streamed.

The package is callable: `isomerge.merge([…])` is `isomerge.merge.api.merge`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """`isomerge.merge` is both the verb and the folder; Python gives the folder, so the folder answers the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from isomerge.merge.api import merge

        return merge(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
