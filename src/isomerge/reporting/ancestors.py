"""The models that a model was made of, and what these were made of, read from the records that isomerge has left."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isomerge.errors import IsomergeError
from isomerge.reporting.record import Record, read_record
from isomerge.text import visible

DEEPEST = 8
MOST = 1000
"""Models in one drawing: a record may name any number of parents, and each of them too."""

Ancestor = dict[str, Any]
Find = Callable[[str], Path | None]
"""From a reference to its folder; None for a hub id, for what was moved away, and for what may not be looked at."""


def ancestor(path: Path | None, name: str, find: Find) -> Ancestor:
    """A model with its parents, and theirs as far as records tell."""
    return _ancestor(path, name, find, "", frozenset(), itertools.count(1))


def _ancestor(
    path: Path | None, name: str, find: Find, role: str, below: frozenset[Path], number: Iterator[int]
) -> Ancestor:
    """`below` are those it went into; `number` counts all of them."""
    entry: Ancestor = {"name": visible(name, keep=""), "role": role, "made": None, "parents": []}
    if path is None or len(below) == DEEPEST or path.resolve() in below:
        return entry
    try:
        record = read_record(path)
    except IsomergeError:
        return entry  # a model that isomerge has not made
    entry["made"] = visible(str(record.get("method") or record["kind"]), keep="")
    for parent in record.get("inputs") or ():
        reference = str(parent.get("reference"))
        kind = visible(str(parent.get("role") or "model"), keep="")
        if next(number) > MOST:
            break
        entry["parents"].append(_ancestor(find(reference), reference, find, kind, below | {path.resolve()}, number))
    return entry


def earlier_generations(record: Record) -> list[Record]:
    """Everything that the inputs of a record were made of: by whom, in which generation, and how."""

    def walk(child: Ancestor, generation: int) -> Iterator[Record]:
        for parent in child["parents"]:
            names = {"of": child["name"], "by": child["made"], "generation": generation}
            yield {"reference": parent["name"], "role": parent["role"], **names}
            yield from walk(parent, generation + 1)

    found, number = [], itertools.count(1)
    for entry in record.get("inputs") or ():
        reference = str(entry.get("reference"))
        found += list(walk(_ancestor(_local(reference), reference, _local, "", frozenset(), number), 2))
    return found


def _local(reference: str) -> Path | None:
    try:
        path = Path(os.path.expanduser(reference))
        return path if path.is_dir() else None
    except (OSError, ValueError):
        return None
