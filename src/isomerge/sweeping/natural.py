"""What a search varies where nothing is named: the numbers of a recipe that have a natural range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isomerge.errors import RequestError
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.document import as_data
from isomerge.merging.recipe.entries import parameter_blocks
from isomerge.merging.recipe.options import AnyMethod
from isomerge.merging.recipe.problem_list import spelled
from isomerge.sweeping.parameter_names import RecipeData, merged_entries, pair_of
from isomerge.sweeping.ranges import Axis

NATURAL = {"weight": (0.0, 1.0), "t": (0.0, 1.0), "alpha": (0.0, 1.0), "lambda": (0.0, 1.5), "density": (0.1, 1.0)}
LEAST = 0.01
"""The least weight that is tried where weights are divided by their sum, which 0 for every model would make 0."""
FURTHER = 1.5
"""How far task vectors are followed: a little beyond the model they lead to."""


def natural_axes(recipe: Recipe) -> list[Axis]:
    """The weight of every model, and the other numbers that the recipe writes, each over its natural range, which is
    widened where the recipe's own number lies outside.

    >>> recipe = {"merge_method": "ties", "base_model": "a", "models": [{"model": "b"}]}
    >>> recipe["parameters"] = {"density": 0.05}
    >>> from isomerge.merging.recipe import load_recipe
    >>> [(axis.name, axis.bounds) for axis in natural_axes(load_recipe(recipe)[0])]
    [('lambda', (0.0, 1.5)), ('parameters.density', (0.05, 1.0))]
    """
    data = as_data(recipe)
    method = ALL_METHODS[recipe.merge_method]
    places = [*_weights(data, method), *_written(data, method)]
    known = {option.name for option in method.options}
    places = places or [(name, name, None) for name in NATURAL if name in known and name != "density"]
    if not places:
        raise RequestError(
            f"Searching: {method.name} has no number with a natural range in this recipe. Name what to vary, as in "
            "over={'seed': '0:9'}.",
            keys=("over",),
        )
    least = LEAST if _divides(data, method) else 0.0
    return [Axis(address, bounds=_around(name, number, method, least)) for address, name, number in places]


Place = tuple[str, str, float | None]
"""Address, option, and the number that stands there."""


def _weights(data: RecipeData, method: AnyMethod) -> Iterator[Place]:
    """How much of each model: the share of the second where only that counts, one number each otherwise."""
    options = {option.name: option for option in method.options}
    if "weight" not in options or not options["weight"].per_model or "models" not in data:
        return
    if method.base != "required" and pair_of(data, method) and _divides(data, method):
        yield "t", "t", None
        return
    entries = merged_entries(data, method)
    if len(entries) == 1 and _divides(data, method):
        entries = []  # divided by itself
    for place, entry in enumerate(data["models"]):
        number = (entry.get("parameters") or {}).get("weight", (data.get("parameters") or {}).get("weight"))
        if any(entry is one for one in entries) and not isinstance(number, list):
            yield f"models[{place}].weight", "weight", number
    if "lambda" in options and _divides(data, method) and "lambda" not in (data.get("parameters") or {}):
        yield "lambda", "lambda", None  # what is divided by the sum of the weights has lost its length


def _divides(data: RecipeData, method: AnyMethod) -> bool:
    """Whether weights are divided by their sum."""
    default = next((option.default for option in method.options if option.name == "normalize"), True)
    return bool((data.get("parameters") or {}).get("normalize", default))


def _written(data: RecipeData, method: AnyMethod) -> Iterator[Place]:
    """Every other number that stands in the recipe, those of gradients and under filters among them."""
    known = {option.name for option in method.options}
    for path, block, of_model in parameter_blocks(data):
        for name, value in block.items():
            of_each = name == "weight" and "models" in data and (of_model or path == ("parameters",))
            if name in known and name in NATURAL and (isinstance(value, list) or not of_each):
                for way, number in _numbers(value, (*path, name)):
                    yield spelled(way), name, number


def _numbers(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], float]]:
    if isinstance(value, dict):
        yield from _numbers(value.get("value"), (*path, "value"))
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _numbers(one, (*path, place))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def _around(name: str, number: float | None, method: AnyMethod, least: float) -> tuple[float, float]:
    low, high = NATURAL[name]
    if name == "weight":
        low, high = least, FURTHER if method.base == "required" else high
    return (low, high) if number is None else (min(low, number), max(high, number))
