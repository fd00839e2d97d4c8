"""Long paths on a terminal, from their common folder on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

LONG = 24
"""A common folder shorter than this is left where it is."""
COPIED = ("suggestion", "recipe", "best_recipe", "recipe_file", "report", "page")
"""Keys whose text is there to be copied."""


def shortened(record: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The record with `…` in place of the folder that its files and folders share, and that folder if it is long."""
    folders = {os.path.dirname(path) for path in _paths(record)}
    try:
        common = os.path.commonpath(folders) if len(folders) > 1 else "".join(folders)
    except ValueError:  # absolute and relative ones, or two drives
        common = ""
    if len(common) < LONG:
        return record, None
    return {key: one if key in COPIED else _replaced(one, common + os.sep) for key, one in record.items()}, common


def _paths(value: Any) -> Iterator[str]:
    """Every text in a record that is the path of something on disk."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _paths(one) if key not in COPIED else ()
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _paths(one)
    elif isinstance(value, (str, os.PathLike)) and os.sep in str(value) and os.path.lexists(value):
        yield os.fspath(value)


def _replaced(value: Any, start: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(one, start) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(one, start) for one in value]
    return str(value).replace(start, f"…{os.sep}") if isinstance(value, (str, os.PathLike)) else value
