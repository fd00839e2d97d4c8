"""Checks of what a public function was given: a wrong type or word is a RequestError that names the argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from isomerge.errors import NotFoundError, RequestError, did_you_mean

NAMES: dict[Any, str] = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    os.PathLike: "a path",
    Mapping: "a mapping",
    Callable: "a function",
}

SHARED: dict[str, tuple[Any, ...]] = {
    "batch_size": (int, None),
    "device": (str,),
    "force": (bool,),
    "limit": (int, None),
    "max_memory": (int, str, None),
    "out": (str, os.PathLike, None),
    "plot": (str, os.PathLike, None),
    "progress": (Callable, bool, None),
    "seed": (int,),
    "task": (str, None),
    "threads": (int, None),
}
"""What arguments that many functions have may be."""


def require_types(**arguments: tuple[Any, ...]) -> None:
    """Each argument as (value, type, type, …); None among the types allows None. Booleans are not numbers.

    >>> require_types(sweeps=("3", int), scale=(None, bool, None))
    Traceback (most recent call last):
        ...
    isomerge.errors.RequestError: sweeps must be a whole number, not '3'.
    """
    for name, (value, *types) in arguments.items():
        if not any(_is(value, kind) for kind in types):
            wanted = " or ".join(NAMES.get(kind, getattr(kind, "__name__", "None")) for kind in types)
            raise RequestError(f"{name} must be {wanted}, not {value!r:.60}.", keys=(name,))


def require_shared_types(**arguments: Any) -> None:
    """
    >>> require_shared_types(seed=0, threads="2")
    Traceback (most recent call last):
        ...
    isomerge.errors.RequestError: threads must be a whole number or None, not '2'.
    """
    require_types(**{name: (value, *SHARED[name]) for name, value in arguments.items()})


def _is(value: Any, kind: type | None) -> bool:
    if kind is None:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    numbers: dict[type, type] = {int: Integral, float: Real}
    return isinstance(value, numbers.get(kind, kind))


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """
    >>> require_choice("level", "rotatoin", ["rotation", "full"])
    Traceback (most recent call last):
        ...
    isomerge.errors.RequestError: level cannot be 'rotatoin'. Did you mean 'rotation'?
    """
    choices = list(choices)
    if value not in choices:
        raise RequestError(f"{name} cannot be '{value}'. {did_you_mean(value, choices)}", keys=(name,))


def usable_path(given: str | os.PathLike[str], act: str) -> Path:
    """The path with ~ written out; an error where no file could have it: too long, a zero in it, nobody's home.

    `act` is what was being done, as in "opening checkpoint".
    """
    text = os.fspath(given)
    try:
        path = Path(text).expanduser()
        path.lstat()
    except (OSError, ValueError, RuntimeError) as error:
        # Whoever opens it says what is wrong with a path that is merely not there.
        if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
            return path
        cause = getattr(error, "strerror", None) or str(error)
        raise NotFoundError(
            f"While {act} {text[:100]!a}: no file can be called so ({cause}). Check the path."
        ) from error
    return path
