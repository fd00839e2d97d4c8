"""The value of an option for one tensor: scopes in order of precedence, filters, gradients over the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isomerge.merging.methods import Option
from isomerge.merging.recipe.fields import Conditional, Settings
from isomerge.merging.recipe.problems import Path, Places


@dataclass(frozen=True)
class Scope:
    """One `parameters` block that applies to a tensor."""

    settings: Settings | None
    path: Path
    label: str
    """'parameters of model-b'."""


UNSET = object()


@dataclass
class Resolver:
    """Finds values, and remembers which entries of filter lists were ever used."""

    places: Places
    used: set[Path] = field(default_factory=set)

    def find(self, option: Option, scopes: Sequence[Scope], tensor: str, t: float) -> tuple[Any, str]:
        """The value and where it came from; UNSET where no scope has one for this tensor."""
        for scope in scopes:
            if scope.settings is None or option.name not in scope.settings:
                continue
            path = (*scope.path, option.name)
            setting: Any = scope.settings[option.name]
            if not is_filters(setting):
                return self._value(option, setting, t, scope, path, "")
            for i, entry in enumerate(setting):
                if entry.filter in (None, "*") or entry.filter in tensor:
                    self.used.add((*path, i))
                    note = f", filter {entry.filter}" if entry.filter is not None else ""
                    return self._value(option, entry.value, t, scope, (*path, i), note)
        return UNSET, ""

    def _value(self, option: Option, value: Any, t: float, scope: Scope, path: Path, note: str) -> tuple[Any, str]:
        if isinstance(value, (list, tuple)):
            value, note = along(value, t), f"{note}, gradient at {t:.3g}"
            if option.kind is int and value is not None:
                value = int(value) if float(value).is_integer() else value
        return value, f"{self.places.where(path)}: {scope.label}{note}"


def is_filters(setting: Any) -> bool:
    return isinstance(setting, tuple) and any(isinstance(one, Conditional) for one in setting)


def along(values: Sequence[Any], t: float) -> Any:
    """The value at t in [0, 1] of a gradient: numbers are interpolated, anything else is stepped.

    >>> along([0.0, 1.0, 0.0], 0.25), along([True, False], 0.9)
    (0.5, True)
    """
    position = t * (len(values) - 1)
    left = int(position)
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return values[left]
    right = min(len(values) - 1, left + 1)
    share = position - left
    return (1 - share) * values[left] + share * values[right]
