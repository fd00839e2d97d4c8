"""Data that some points of a sweep look at and others do not: a recipe must not name what nothing in it uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.methods.method import MEASURED
from isomerge.merging.recipe.data_rules import unused_keys
from isomerge.merging.recipe.options import parameter_blocks
from isomerge.merging.recipe.problems import Path

Data = dict[str, Any]


def only_used(points: Sequence[Data]) -> list[Data]:
    """The recipes of all points, each without the data that only other points use.

    What no point uses stays, and is refused where the recipe is read: it is a mistake here as in any recipe.

    >>> sibling = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}
    >>> align = [{"evidence": word, "data": "images"} for word in ("weights", "mix")]
    >>> [point["align"] for point in only_used([{**sibling, "align": one} for one in align])]
    [{'evidence': 'weights'}, {'evidence': 'mix', 'data': 'images'}]
    """
    unused = [_unused(point) for point in points]
    mistakes = set.intersection(*unused) if unused else set()
    return [_without(point, paths - mistakes) for point, paths in zip(points, unused, strict=True)]


def _unused(data: Mapping[str, Any]) -> set[Path]:
    method = ALL_METHODS.get(str(data.get("merge_method")))
    if method is None:
        return set()
    files = any(block.get(option) is not None for _, block, _ in parameter_blocks(data) for option in MEASURED)
    return set(unused_keys(method, data, files))


def _without(data: Data, paths: set[Path]) -> Data:
    result = copy.deepcopy(data)
    for *way, last in paths:
        holder: Any = result
        for step in way:
            holder = holder[step]
        del holder[last]
    return result
