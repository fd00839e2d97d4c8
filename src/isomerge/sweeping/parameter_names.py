"""From the name of a parameter to its places in a recipe, and a recipe with other values there.

| name                  | means                                                                          |
|-----------------------|--------------------------------------------------------------------------------|
| `density`             | an option of the method: this value everywhere                                 |
| `models[1].weight`    | an option of one model, slice or module; also `models.1.weight`                |
| `model-b.weight`      | the same, by the model's path or its last part                                 |
| `align.level`, `seed` | a key of the recipe, with dots between keys and numbers from 0 in brackets     |
| `t`                   | where the method has no `t` and merges two models by weight: weights 1 − t and t |
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from isomerge.errors import RequestError, near_miss
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.entries import parameter_blocks
from isomerge.merging.recipe.options import AnyMethod
from isomerge.merging.recipe.problem_list import spelled
from isomerge.sweeping.ranges import Value

RecipeData = dict[str, Any]
Steps = list[str | int]
LISTS = ("models", "slices", "sources", "modules")
"""Their entries have `parameters`."""
OPTIONS = {option.name for method in ALL_METHODS.values() for option in method.options}
"""Of any method."""
MOST_NAMED = 3
"""Models and options of which a message gives the address."""


def changed(data: Mapping[str, Any], values: Mapping[str, Value]) -> RecipeData:
    """A recipe's data with other values; the method first, since it decides which options there are.

    >>> changed({"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}]}, {"t": 0.3})["parameters"]
    {'t': 0.3}
    """
    result: RecipeData = copy.deepcopy(dict(data))
    for name in sorted(values, key=lambda name: name != "merge_method"):
        _set(result, name, values[name])
    return result


def without_other_options(data: Mapping[str, Any], name: Value) -> RecipeData:
    """A recipe's data without the options that a method of this name does not have.

    >>> without_other_options({"merge_method": "ties", "parameters": {"density": 0.5, "weight": 1}}, "linear")
    {'merge_method': 'ties', 'parameters': {'weight': 1}}
    """
    result: RecipeData = copy.deepcopy(dict(data))
    method = ALL_METHODS.get(str(name))
    known = {option.name: option for option in method.options} if method else {}
    for _, block, of_model in parameter_blocks(result) if method else ():
        for option in [key for key in block if key not in known or (of_model and not known[key].per_model)]:
            del block[option]
    return result


def _set(data: RecipeData, name: str, value: Value) -> None:
    method = ALL_METHODS.get(str(data.get("merge_method")))
    options = {option.name for option in method.options} if method else set()
    if method is not None and name in options:
        _everywhere(data, method, name, value)
    elif name == "t" and method is not None and (pair := pair_of(data, method)):
        _share(pair, value)
    elif re.split(r"[.\[]", name)[0] in Recipe.model_fields:
        _put(data, [], _steps(name), value, options, name)
    elif own := list(_of_model(data, name)):
        for entry, rest in own:
            _put(entry, ["models", 0], rest, value, options, name)
    else:
        raise _unknown(data, name, options)


def _everywhere(data: RecipeData, method: AnyMethod, name: str, value: Value) -> None:
    """In place of every value that is there, and where there is none for all."""
    blocks = [block for _, block, _ in parameter_blocks(data) if name in block]
    for block in blocks:
        block[name] = value
    if name in (data.get("parameters") or {}):
        return
    per_model = any(option.name == name and option.per_model for option in method.options)
    if per_model and "models" in data:
        # To each model and not to all at once, which would make an unlisted base of some methods one more model.
        for entry in merged_entries(data, method):
            _block(entry)[name] = value
    else:
        _block(data)[name] = value


def pair_of(data: RecipeData, method: AnyMethod) -> list[RecipeData]:
    """The two models between which a share makes sense."""
    weighs = any(option.name == "weight" and option.per_model for option in method.options)
    entries = merged_entries(data, method) if weighs else []
    return entries if len(entries) == 2 else []


def _share(pair: list[RecipeData], value: Value) -> None:
    if isinstance(value, (bool, str)) or value is None:
        raise RequestError(
            f"Sweeping over t={value}: it is the share of the second model, a number. Write t=0:1:0.1 or t=0.2,0.5."
        )
    rest = [round(1 - one, 12) for one in value] if isinstance(value, list) else round(1 - value, 12)
    _block(pair[0])["weight"], _block(pair[1])["weight"] = rest, value


def merged_entries(data: RecipeData, method: AnyMethod) -> list[RecipeData]:
    """The entries of `models` besides a base that is listed among them."""
    base = data.get("base_model") if method.base != "ignored" else None
    return [entry for entry in data.get("models", ()) if entry["model"] != base]


def _of_model(data: RecipeData, name: str) -> Iterator[tuple[RecipeData, Steps]]:
    """The entries of the model that the name begins with, each with the rest of the name."""
    entries = list(_model_entries(data))
    named = [(entry, short) for entry in entries for short in _called(entry["model"]) if name.startswith(short + ".")]
    longest = max((len(short) for _, short in named), default=0)
    meant = [entry for entry, short in named if len(short) == longest]
    if len(models := sorted({entry["model"] for entry in meant})) > 1:
        raise RequestError(f"Sweeping over '{name}': {' and '.join(models)} are called so. Write the whole path.")
    for entry in meant:
        yield entry, _steps(name[longest + 1 :])


def _called(reference: str) -> set[str]:
    """
    >>> sorted(_called("models/model-b"))
    ['model-b', 'models/model-b']
    """
    return {reference, reference.rstrip("/").rpartition("/")[2]}


def _model_entries(data: Mapping[str, Any]) -> Iterator[RecipeData]:
    yield from data.get("models", ())
    for part in data.get("slices", ()):
        yield from part["sources"]
    for module in data.get("modules", {}).values():
        yield from _model_entries(module)


def _steps(name: str) -> Steps:
    """
    >>> _steps("models[1].weight")
    ['models', 1, 'weight']
    """
    if not re.fullmatch(r"[^.\[\]]+(\[\d+\])*(\.[^.\[\]]+(\[\d+\])*)*", name):
        raise RequestError(
            f"Sweeping over '{name}': a place in a recipe is written as in models.1.weight or align.level."
        )
    return [int(number) if number else word for word, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", name)]


def _put(node: Any, path: Steps, steps: Steps, value: Value, options: set[str], name: str) -> None:
    """Walk from the node at `path` to the last step, making the mappings on the way, and set the value there."""
    rest = list(steps)
    while True:
        if len(path) > 1 and path[-2] in LISTS and rest[0] in options:
            rest.insert(0, "parameters")  # models[1].weight is short for models[1].parameters.weight
        elif len(path) > 1 and path[-2] in LISTS and rest[0] in OPTIONS:
            raise RequestError(
                f"Sweeping over '{name}': this method has no '{rest[0]}'. Its options: {', '.join(sorted(options))}."
            )
        step = rest.pop(0)
        if isinstance(node, list) and isinstance(step, str) and step.isdecimal():
            step = int(step)  # models.1 is models[1], which shells read as a pattern
        _require_step(node, step, spelled(tuple(path)), name)
        if not rest:
            node[step] = value
            return
        if isinstance(step, str) and (node.get(step) is None or node[step] is True):
            node[step] = {}  # `align: true` is short for all of its defaults
        path, node = [*path, step], node[step]


def _require_step(node: Any, step: str | int, here: str, name: str) -> None:
    if isinstance(step, int) and not isinstance(node, list):
        raise RequestError(f"Sweeping over '{name}': '{here}' is no list in this recipe, so it has no [{step}].")
    if isinstance(step, int) and step >= len(node):
        last = f"the last is {here}.{len(node) - 1}" if node else "it is empty"
        raise RequestError(f"Sweeping over '{name}': '{here}' has {len(node)} entries, counted from 0: {last}.")
    if isinstance(step, str) and isinstance(node, list):
        raise RequestError(
            f"Sweeping over '{name}': '{here}' is a list. Say which entry, counted from 0: {here}.0.{step}."
        )
    if isinstance(step, str) and not isinstance(node, dict):
        raise RequestError(f"Sweeping over '{name}': '{here}' is {node} in this recipe, and has no '{step}'.")


def _block(entry: RecipeData) -> RecipeData:
    if not entry.get("parameters"):
        entry["parameters"] = {}
    block: RecipeData = entry["parameters"]
    return block


def _unknown(data: RecipeData, name: str, options: set[str]) -> RequestError:
    method = data.get("merge_method")
    model = name.rpartition(".")[0]
    models = sorted({short for entry in _model_entries(data) for short in _called(entry["model"])})
    hint = near_miss(model, models) if model else near_miss(name, [*sorted(options), *Recipe.model_fields])
    hint = f" {hint}" if hint else ""
    if name == "t":
        hint = " As the share of the second model, t needs a method that merges two models by weight."
    return RequestError(
        f"Sweeping over '{name}': {method} has no such option, and the recipe no such key or model.{hint} "
        f"What can be varied here: {', '.join(_addresses(data))}; and keys of the recipe, as in seed or align.level."
    )


def _addresses(data: RecipeData) -> Iterator[str]:
    """What `--over` may name: the method's options, and those of single models."""
    method = ALL_METHODS.get(str(data.get("merge_method")))
    for option in method.options if method else ():
        yield option.name
    if method is not None and pair_of(data, method):
        yield "t (the share of the second model)"
    own = [option.name for option in method.options if option.per_model] if method else []
    for name in own[:MOST_NAMED]:
        yield from _of_each(data, name)


def _of_each(data: RecipeData, name: str) -> Iterator[str]:
    entries = list(data.get("models", ()))
    for place, entry in enumerate(entries[:MOST_NAMED]):
        yield f"models.{place}.{name} ({entry['model']})"
    if not entries and data.get("slices"):
        yield f"slices.0.sources.0.{name}"


def of_one_model(data: RecipeData, name: str) -> str:
    """How to vary an option of one model, for a name that alone is the same for all; nothing for other names.

    >>> of_one_model({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}, "weight")
    "'weight' alone is the same for every model; for one, write models.0.weight (a), models.1.weight (b), or t for the \
share of the second"
    """
    method = ALL_METHODS.get(str(data.get("merge_method")))
    if method is None or not any(option.name == name and option.per_model for option in method.options):
        return ""
    share = ", or t for the share of the second" if name == "weight" and pair_of(data, method) else ""
    return f"'{name}' alone is the same for every model; for one, write {', '.join(_of_each(data, name))}{share}"
