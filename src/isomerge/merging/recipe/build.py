"""`recipe_of`: the recipe of a command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from isomerge.errors import RequestError
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.definitions import Recipe
from isomerge.merging.recipe.load import load_recipe
from isomerge.merging.recipe.reference import ModelReference


def recipe_of(
    models: Sequence[str | os.PathLike[str] | ModelReference],
    method: str = "linear",
    base: str | os.PathLike[str] | ModelReference | None = None,
    options: Mapping[str, Any] | None = None,
    align: bool | Mapping[str, Any] = False,
    *,
    dtype: str | None = None,
    out_dtype: str | None = None,
    tokenizer: str | Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    data: Any = None,
    calibrate: Mapping[str, Any] | None = None,
    repair: bool | Mapping[str, Any] = False,
    seed: int = 0,
    name: str | None = None,
) -> Recipe:
    """The recipe that the equivalent YAML gives.

    An option's value holds for all models; a list gives an option that every model has for itself one value per model,
    in the order of `models`, and is a gradient over the layers for any other option. `data` is a path, a mapping, or a
    list with one of these for each model.

    >>> recipe = recipe_of(["a", "b"], "linear", options={"weight": [0.3, 0.7]})
    >>> recipe.models[1].parameters
    {'weight': 0.7}
    """
    entries: list[dict[str, Any]] = [{"model": _named(model)} for model in models]
    shared: dict[str, Any] = {}
    each = (
        {option.name for option in ALL_METHODS[method].options if option.per_model} if method in ALL_METHODS else set()
    )
    for key, value in (options or {}).items():
        if key in each and isinstance(value, (list, tuple)):
            if len(value) != len(entries):
                raise RequestError(
                    f"Merging with {method}: '{key}' has {len(value)} values for {len(entries)} models. "
                    "Give one for each, in their order."
                )
            for entry, one in zip(entries, value, strict=True):
                entry.setdefault("parameters", {})[key] = one
        else:
            shared[key] = value
    if isinstance(data, (list, tuple)):
        if len(data) != len(entries):
            raise RequestError(
                f"Merging: there are {len(data)} data sets for {len(entries)} models. Give one for all, or one "
                "for each in their order."
            )
        for entry, own in zip(entries, data, strict=True):
            entry["data"] = own
        data = None
    content = {
        "name": name, "merge_method": method, "base_model": None if base is None else _named(base), "models": entries,
        "parameters": shared or None, "dtype": dtype, "out_dtype": out_dtype, "chat_template": chat_template,
        "align": align, "data": data, "calibrate": calibrate, "repair": repair, "seed": seed,
        "tokenizer": {"source": tokenizer} if isinstance(tokenizer, str) else tokenizer,
    }  # fmt: skip
    (recipe,) = load_recipe({key: value for key, value in content.items() if value is not None})
    return recipe


def _named(model: str | os.PathLike[str] | ModelReference) -> str | ModelReference:
    return model if isinstance(model, ModelReference) else os.fspath(model)
