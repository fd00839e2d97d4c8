"""How a verb is declared: a function whose parameters are its flags, or groups of flags that several verbs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

Command = Callable[..., None]


@dataclass(frozen=True)
class Declaration:
    summary: str
    """Its line in `isomerge --help`, at most 80 columns with the name."""
    example: str
    settings: dict[str, Any]
    """Settings of the parser."""


DECLARED: dict[Command, Declaration] = {}


def verb(
    summary: str, example: str, *, method_options: bool = False, more: Iterable[inspect.Parameter] = ()
) -> Callable[[Command], Command]:
    """Declare a verb. A parameter whose type is a dataclass is replaced by its fields, each of which is a flag.

    With `method_options` the verb also takes flags that no parameter names: the options of merge methods. `more` are
    flags that come from a table; a function that has such flags takes them as `**given`.
    """

    def declare(function: Command) -> Command:
        # Not get_type_hints, which in Python 3.10 puts an Optional around what has the default None; typer would not
        # see what is written inside.
        hints = inspect.get_annotations(function, eval_str=True)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

        @functools.wraps(function)
        def run(**flags: Any) -> None:
            for name, group in groups.items():
                flags[name] = group(**{field.name: flags.pop(field.name) for field in fields(group)})
            function(**flags)

        parameters = []
        for name, parameter in inspect.signature(function).parameters.items():
            if name in groups:
                parameters += _flags_of(groups[name])
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                parameters += more
            else:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(kind=kind, annotation=hints[name]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if method_options else {}
        DECLARED[run] = Declaration(summary, example, settings)
        return run

    return declare


def _flags_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
