"""The demo: small models trained on the spot on real data, aligned, averaged and measured.

The package is callable: `isomerge.demo(out)` is `isomerge.demo.run.demo`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from isomerge.demo.run import demo

__all__ = ["demo"]


class _CallablePackage(ModuleType):
    """`isomerge.demo` is both the verb and the folder; Python gives the folder, so the folder answers the call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return demo(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
