"""The value of every option for one tensor, and what the method says to these values before any work is done."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isomerge.errors import RequestError
from isomerge.merging.methods import Method, Option
from isomerge.merging.methods.method import OptionError
from isomerge.merging.plan.tensor_plan import TensorPlan
from isomerge.merging.recipe.fields import Conditional, Settings
from isomerge.merging.recipe.problem_list import Path, Places
from isomerge.merging.run.rows import GramSource, InMemory, TensorGroup, TensorSource, gram_options


@dataclass(frozen=True)
class OptionScope:
    """One `parameters` block that applies to a tensor."""

    settings: Settings | None
    path: Path
    label: str
    """'parameters of model-b'."""


UNSET = object()


@dataclass
class OptionResolver:
    """Finds values, and remembers which entries of filter lists were ever used."""

    places: Places
    used: set[Path] = field(default_factory=set)

    def find(self, option: Option, scopes: Sequence[OptionScope], tensor: str, t: float) -> tuple[Any, str]:
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

    def _value(
        self, option: Option, value: Any, t: float, scope: OptionScope, path: Path, note: str
    ) -> tuple[Any, str]:
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


SHAPE = (4, 4)


def rejections(method: Method, tensors: Iterable[TensorPlan]) -> Iterator[str]:
    """Values that only the method can judge: how two options go together, or what weights add up to. Told with the
    first tensor that has them and with where they were written."""
    tried: set[str] = set()
    for one in tensors:
        key = f"{len(one.inputs)} {one.base is None} {one.options}"
        if one.method != method.name or key in tried:
            continue
        tried.add(key)
        problem = rejection(method, one.options, len(one.inputs), one.base is not None)
        if problem is not None:
            named = problem.options if isinstance(problem, OptionError) else ()
            origins = {o for k, o in one.origins.items() if k.partition(" of ")[0] in named and o != "default"}
            where = f" ({'; '.join(sorted(origins))})" if origins else ""
            yield f"{method.name}, first for {one.name}: {str(problem).rstrip('.')}{where}"


def rejection(method: Method, options: Mapping[str, Any], models: int, with_base: bool) -> RequestError | None:
    """What the method has against these options; None if it takes them."""
    generator = torch.Generator().manual_seed(0)
    sources = [InMemory(torch.randn(SHAPE, generator=generator)) for _ in range(models)]
    base = InMemory(torch.randn(SHAPE, generator=generator)) if with_base else None
    group = TensorGroup("a tensor", sources, base, option_tensors=stand_ins(method, SHAPE, models))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method(group, **options)(group.whole())
        except RequestError as error:
            return error
    return None


def stand_ins(method: Method, shape: Sequence[int], models: int) -> dict[str, list[TensorSource]]:
    """Something in place of every file that the method's options can name."""
    sources: dict[str, list[TensorSource]] = {}
    width = shape[-1]
    for option in method.options:
        if option.kind is not str or option.choices:
            continue
        count = models if option.per_model else 1
        if option.name in gram_options(method.function):
            gram = GramSource(
                10 * width, False, "a stand-in", lambda: torch.eye(width).double(), lambda: torch.zeros(width).double()
            )
            sources[option.name] = [gram] * count
        else:
            sources[option.name] = [InMemory(torch.ones(tuple(shape)), "a stand-in")] * count
    return sources
