"""How data is read: one value for the library, for recipes and for the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from isomerge.arguments import require_choice
from isomerge.choices import DATA_KINDS
from isomerge.errors import RequestError, did_you_mean


@dataclass(frozen=True)
class DataOptions:
    """Which examples of a data set are used, and how they are read; all of it may be left to isomerge.

    Functions that take `data` take these options with it, as a mapping: {"path": "a.csv", "split": "test"}.
    """

    split: str | None = None
    """train, validation or test, where the data has parts."""
    text: str | None = None
    """The column of the texts, by its name or its position from 0; two with a comma between."""
    label: str | None = None
    """The column of the labels."""
    kind: str | None = None
    """What the data is, where it cannot be seen: one of `isomerge.choices.DATA_KINDS`."""
    length: int | None = None
    """Cut texts to this many tokens."""
    limit: int | None = None
    """Use this many examples, drawn evenly over the data."""

    def __post_init__(self) -> None:
        for name in ("text", "label"):
            if isinstance(position := getattr(self, name), int) and not isinstance(position, bool):
                object.__setattr__(self, name, str(position))
        for option in fields(self):
            value, wanted = getattr(self, option.name), int if option.name in ("length", "limit") else str
            if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
                what = "a whole number" if wanted is int else "a text"
                raise RequestError(f"Opening data: {option.name} must be {what}, not {value!r}.", keys=(option.name,))
        if self.kind is not None:
            require_choice("kind", self.kind, DATA_KINDS)
        if self.length is not None and self.length < 2:
            raise RequestError(
                f"Opening data: texts of {self.length} tokens are too short to learn from. Use 2 or more.",
                keys=("length",),
            )

    def updated(self, given: Mapping[str, Any]) -> DataOptions:
        """These options where `given` names none, by name."""
        names = [option.name for option in fields(self)]
        for unknown in sorted(set(given) - set(names), key=str):
            raise RequestError(
                f"Opening data: there is no option '{unknown}'. {did_you_mean(unknown, ['path', *names])}",
                keys=(str(unknown),),
            )
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def split_source(source: Mapping[str, Any]) -> tuple[str, DataOptions]:
    """The path and the options of data that is named by a mapping, as in a recipe."""
    path = source.get("path")
    if not isinstance(path, (str, os.PathLike)):
        raise RequestError(
            "Opening data: a mapping names a data set by its 'path', with options beside it: {'path': 'a.csv', "
            "'split': 'test'}. Pass batches as a list of mappings from names to tensors."
        )
    return os.fspath(path), DataOptions().updated({name: value for name, value in source.items() if name != "path"})
