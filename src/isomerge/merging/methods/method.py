"""What a merge method is, and how a function becomes one."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.run.rows import Combine, TensorGroup

T = TypeVar("T")


class OptionError(RequestError):
    """A value that a method cannot use; `options` are the names of the options it is about."""

    def __init__(self, message: str, *options: str) -> None:
        super().__init__(message, *options)  # all, so that it can be sent from one process to another
        self.options = options

    def __str__(self) -> str:
        return str(self.args[0])


PER_MODEL = "one value per model"
PerModel = typing.Annotated[list[T], PER_MODEL]
"""An option that every model has its own value of. The function gets a list, in the order of the models."""


SHARE = "between 0 and 1"
Share = typing.Annotated[float, SHARE]
"""An option that is a number between 0 and 1."""


def each(value: T) -> list[T]:
    """The default of a per-model option: the same for every model."""
    return [value]


MEASURED = {"importance": "fisher", "statistics": "gram"}
"""Options that name a file of what was measured of each model, and what that is. Data can take the files' place."""
Base = Literal["required", "optional", "ignored"]
SHARES = {"density", "gamma", "select_topk", "share"}
NOT_NEGATIVE = {"floor", "ridge", "tolerance"}
REQUIRED = object()
"""The default of an option that has none."""


@dataclass(frozen=True)
class Option:
    """One option of a method: a key of recipes, a flag of the command line, a row of the documentation."""

    name: str
    kind: type
    """bool, int, float or str: of one value."""
    per_model: bool
    default: Any
    help: str
    nullable: bool = False
    share: bool = False
    choices: tuple[str, ...] = ()
    """The words it may be, if it is no name of a file."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Shares lie between 0 and 1, whatever the method."""
        return (0.0, 1.0) if self.share or self.name in SHARES else None

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value of the right type."""
        if self.bounds and isinstance(value, (int, float)) and not self.bounds[0] <= value <= self.bounds[1]:
            return f"'{self.name}' is a share between 0 and 1, and is {value}"
        if self.name in NOT_NEGATIVE and isinstance(value, (int, float)) and value < 0:
            return f"'{self.name}' must not be negative, and is {value}"
        if self.choices and isinstance(value, str) and value not in self.choices:
            return f"'{self.name}' must be one of {', '.join(self.choices)}, and is '{value}'"
        return None

    @property
    def argument(self) -> str:
        """`lambda` cannot be the name of a Python argument."""
        return self.name + "_" if self.name == "lambda" else self.name


@dataclass(frozen=True)
class Method:
    """A merge method with what recipes, the command line and the documentation need to know of it."""

    name: str
    function: Callable[..., Combine]
    base: Base
    """'ignored': a base model among the models is one of them."""
    least: int
    most: int | None
    """How many models, not counting the base."""
    options: tuple[Option, ...]
    summary: str
    reference: str
    whole: bool = False
    """It works on whole matrices, and holds them in memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_called, (self.name,)  # the function's name is taken by the method itself

    @property
    def measures(self) -> str | None:
        """What it weighs the models by, where that has to be measured on data."""
        return next((MEASURED[option.name] for option in self.options if option.name in MEASURED), None)

    def require_count(self, models: int) -> None:
        """Raise unless it merges so many models, not counting the base."""
        if models < self.least or (self.most is not None and models > self.most):
            wanted = f"at least {self.least}" if self.most is None else f"{self.least}"
            wanted += "" if self.most in (None, self.least) else f" to {self.most}"
            base = " beside the base" if self.base == "required" else ""
            raise RequestError(f"{self.name} merges {wanted} models{base}, and {models} are given.")

    def __call__(self, group: TensorGroup, **options: Any) -> Combine:
        """Run it with the options' recipe names; a single value stands for every model, and defaults fill the rest."""
        bound = {}
        for option in self.options:
            value = options.pop(option.name, options.pop(option.argument, option.default))
            if value is REQUIRED:
                raise OptionError(f"{self.name} needs '{option.name}': {option.help}.", option.name)
            if option.per_model:
                value = list(value) if isinstance(value, (list, tuple)) else [value] * group.models
                if len(value) != group.models:
                    text = f"'{option.name}' of {self.name} has {len(value)} values for {group.models} models."
                    raise OptionError(text, option.name)
            wrong = [option.problem(one) for one in (value if option.per_model else [value])]
            if any(wrong):
                raise OptionError(f"{self.name}: {next(filter(None, wrong))}.", option.name)
            bound[option.argument] = value
        if options:
            unknown = min(options)
            known = [option.name for option in self.options]
            raise RequestError(f"{self.name} has no option '{unknown}'. {did_you_mean(unknown, known)}")
        return self.function(group, **bound)


METHODS: dict[str, Method] = {}


def _method_called(name: str) -> Method:
    return METHODS[name]


def method(
    *,
    base: Base = "ignored",
    least: int = 1,
    most: int | None = None,
    reference: str = "",
    name: str | None = None,
    whole: bool = False,
) -> Callable[[Callable[..., Combine]], Method]:
    """Enter a function `(group, *, options…) -> combine` into the list of methods.

    Its keyword-only arguments are the options; the docstring's first line says what it does, and lines of the form
    `option: what it means` under `Options:` describe each of them.
    """

    def enter(function: Callable[..., Combine]) -> Method:
        document = inspect.getdoc(function) or ""
        known = name or function.__name__
        METHODS[known] = Method(
            known, function, base, least, most, read_options(function, document), document.split("\n", 1)[0], reference,
            whole,
        )  # fmt: skip
        return METHODS[known]

    return enter


def read_options(function: Callable[..., Any], document: str) -> tuple[Option, ...]:
    """The keyword-only arguments of a function as options, described by its docstring."""
    described = _described(document)
    hints = typing.get_type_hints(function, include_extras=True)
    options = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint, per_model, share = hints[parameter.name], False, False
        if SHARE in getattr(hint, "__metadata__", ()):
            hint, share = typing.get_args(hint)[0], True
        if PER_MODEL in getattr(hint, "__metadata__", ()):
            hint, per_model = typing.get_args(typing.get_args(hint)[0])[0], True
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        kinds = [str] if choices else [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
        default: Any = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
        if per_model and default is not REQUIRED:
            (default,) = default  # what `each` wrapped
        key = parameter.name.removesuffix("_")
        nullable = type(None) in typing.get_args(hint)
        options.append(Option(key, kinds[0], per_model, default, described[key], nullable, share, choices))
    return tuple(options)


def _described(document: str) -> dict[str, str]:
    """The lines under `Options:`, a continuation being indented further."""
    section = document.partition("Options:\n")[2].split("\n\n", 1)[0]
    lines = re.sub(r"\n\s{8,}", " ", section)
    return dict(re.findall(r"^\s+(\w+): (.+)$", lines, re.MULTILINE))
