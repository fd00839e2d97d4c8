"""Checks of what a public function was given: a wrong type or word is a RequestError that names the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from isomerge.errors import RequestError, did_you_mean

NAMES = {str: "text", bool: "True or False", int: "a whole number", float: "a number", Mapping: "a mapping"}


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
        raise RequestError(f"{name} cannot be '{value}'. {did_you_mean(value, choices)}")
