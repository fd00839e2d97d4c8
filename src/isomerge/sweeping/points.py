"""The points of a sweep: which values come together, and the recipe of each."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.arguments import require_choice, require_types
from isomerge.choices import SWEEP_MODES
from isomerge.errors import RequestError
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe import Recipe, load_recipe
from isomerge.merging.recipe.data_rules import unused_keys
from isomerge.merging.recipe.document import as_data
from isomerge.merging.recipe.problem_list import Path as RecipePath
from isomerge.sweeping.parameter_names import RecipeData, changed
from isomerge.sweeping.ranges import MOST, Axis, Value

SHOWN = 5  # different problems that one message names

Values = dict[str, Value]


@dataclass(frozen=True)
class Point:
    """The values that are changed, and the recipe with them."""

    values: Values
    recipe: Recipe


def one_recipe(recipe: str | Path | Mapping[str, Any] | Recipe | Sequence[Recipe]) -> Recipe:
    """The only document: of several, it would not be clear which one a parameter belongs to."""
    require_types(recipe=(recipe, str, Path, Mapping, Recipe, Sequence))
    documents = [recipe] if isinstance(recipe, Recipe) else recipe
    if isinstance(documents, (str, Path, Mapping)):
        documents = load_recipe(documents)
    if len(documents) != 1:
        raise RequestError(
            f"Sweeping a recipe of {len(documents)} documents: only one can be swept. Merge the earlier ones first "
            "(isomerge merge), and name what they give in a recipe of its own."
        )
    require_types(recipe=(documents[0], Recipe))
    return documents[0]


def weights_of(recipe: Recipe) -> list[float]:
    """The size of each model's weight; of one that changes over the layers, in the mean.

    >>> [recipe] = load_recipe({"merge_method": "task_arithmetic", "base_model": "a", "models": [
    ...     {"model": "b", "parameters": {"weight": -0.5}}, {"model": "c", "parameters": {"weight": [0, 1]}}]})
    >>> weights_of(recipe)
    [0.5, 0.5]
    """
    shared = (recipe.parameters or {}).get("weight", 1.0)
    models = [entry for entry in recipe.models or () if entry.model != recipe.base_model]
    return [_size((entry.parameters or {}).get("weight", shared)) for entry in models]


def _size(setting: Any) -> float:
    if isinstance(setting, (list, tuple)):
        return sum(map(_size, setting)) / len(setting)
    return abs(float(getattr(setting, "value", setting)))


def grid(axes: Sequence[Axis], mode: str = "grid", *, force: bool = False) -> list[Values]:
    """Every combination, the last parameter fastest; or all parameters step by step together."""
    require_choice("mode", mode, SWEEP_MODES)
    lengths = [len(axis.values) for axis in axes]
    if mode == "together" and len(set(lengths)) > 1:
        counts = ", ".join(f"{axis.name} {length}" for axis, length in zip(axes, lengths, strict=True))
        raise RequestError(f"Sweeping together: the parameters have different numbers of values ({counts}).")
    count = math.prod(lengths) if mode == "grid" else lengths[0]
    if count > MOST and not force:
        product = " × ".join(map(str, lengths))
        raise RequestError(
            f"Sweeping {product} = {count} points: more than {MOST} are not measured unasked. Take larger steps, use "
            "a search, or set force.",
            keys=("search", "force"),
        )
    names = [axis.name for axis in axes]
    rows = itertools.product(*(axis.values for axis in axes)) if mode == "grid" else zip(
        *(axis.values for axis in axes), strict=True
    )  # fmt: skip
    # Each once; True and 1 are two values.
    each = {tuple((type(value), value) for value in row): row for row in rows}.values()
    return [dict(zip(names, row, strict=True)) for row in each]


def points_of(recipe: Recipe | RecipeData, combinations: Sequence[Values]) -> list[Point]:
    """The recipe of every point; all that do not fit, at once."""
    data = as_data(recipe) if isinstance(recipe, Recipe) else recipe
    problems: dict[str, str] = {}
    missing: set[str] = set()
    written: list[dict[str, Any]] = []
    for values in combinations:
        with _collected(problems, missing, values):
            written.append(changed(data, values))
    raise_all(problems, missing, complete=True)
    points: list[Point] = []
    for values, one in zip(combinations, only_used(written), strict=True):
        with _collected(problems, missing, values):
            points.append(Point(values, load_recipe(one)[0]))
    raise_all(problems, missing)
    return points


def only_used(points: Sequence[RecipeData]) -> list[RecipeData]:
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


def _unused(data: Mapping[str, Any]) -> set[RecipePath]:
    method = ALL_METHODS.get(str(data.get("merge_method")))
    return set() if method is None else set(unused_keys(method, data))


def _without(data: RecipeData, paths: set[RecipePath]) -> RecipeData:
    result = copy.deepcopy(data)
    for *way, last in paths:
        holder: Any = result
        for step in way:
            holder = holder[step]
        del holder[last]
    return result


@contextmanager
def _collected(problems: dict[str, str], missing: set[str], values: Values) -> Iterator[None]:
    """Enter a refusal with the point where it was met; the same complaint about the next value is not news."""
    try:
        yield
    except RequestError as error:
        missing |= error.missing
        problems.setdefault(error.cause or str(error), describe_values(values))


def require_different(points: Sequence[Point]) -> None:
    """Refuse points that differ in name only: one parameter takes the place of another."""
    seen: dict[str, Point] = {}
    for point in points:
        other = seen.setdefault(point.recipe.to_yaml(), point)
        if other is not point:
            both = f"{describe_values(other.values)} and {describe_values(point.values)}"
            raise RequestError(
                f"Sweeping: {both} give the same recipe. Two names may mean the same place, or two values the same "
                "thing; leave one of them out."
            )


def raise_all(problems: Mapping[str, str], missing: Iterable[str] = (), *, complete: bool = False) -> None:
    """One error for all, if there are any: sentences, each with the point where it was found. `complete`: the
    sentences themselves say what was being done."""
    if not problems:
        return
    if len(problems) == 1:
        ((text, where),) = problems.items()
        error = RequestError(text if complete else f"Sweeping to {where}: {text}")
    else:
        listed = [f"({n}) {where}: {text}" for n, (text, where) in enumerate(problems.items(), start=1)]
        more = f" … and {len(listed) - SHOWN} more." if len(listed) > SHOWN else ""
        error = RequestError(f"Sweeping, {len(listed)} problems: {' '.join(listed[:SHOWN])}{more}")
    error.missing = frozenset(missing)
    raise error


def describe_values(values: Mapping[str, Value]) -> str:
    """
    >>> describe_values({"t": 0.30000000000000004, "align": True})
    't=0.3, align=true'
    """
    return ", ".join(f"{name}={word(value)}" for name, value in values.items()) or "the recipe as it is"


def word(value: Value) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(word, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
