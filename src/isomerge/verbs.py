"""Packages that are also verbs: `isomerge.align` is a folder of modules and a function to call.

Python gives the folder, whichever way it was imported, so the folder answers the call.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def answers_calls(package: str, module: str) -> None:
    """Make `package` callable: the call goes to the function of its own name in `module`, imported when it is used."""

    class Verb(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(module), package.rpartition(".")[2])(*args, **kwargs)

    sys.modules[package].__class__ = Verb
