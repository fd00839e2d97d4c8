"""What mergekit has: its merge methods with their options, as of 0.1.5, and recipes as it understands them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isomerge.merging.data_methods import ALL_METHODS, DataMethod
from isomerge.merging.methods import Method
from isomerge.merging.recipe.definitions import Recipe
from isomerge.merging.recipe.document import as_data, dump
from isomerge.merging.recipe.entries import parameter_blocks, walk

_TASK_VECTORS = ("weight", "density", "normalize", "rescale", "lambda", "int8_mask")
MERGEKIT: dict[str, tuple[str, ...]] = {
    "arcee_fusion": (),
    "breadcrumbs": (*_TASK_VECTORS, "gamma"),
    "breadcrumbs_ties": (*_TASK_VECTORS, "gamma"),
    "dare_linear": _TASK_VECTORS,
    "dare_ties": _TASK_VECTORS,
    "della": (*_TASK_VECTORS, "epsilon"),
    "della_linear": (*_TASK_VECTORS, "epsilon"),
    "karcher": ("max_iter", "tol"),
    "linear": ("weight", "normalize"),
    "model_stock": ("filter_wise",),
    "multislerp": ("weight", "normalize_weights", "eps"),
    "nearswap": ("t",),
    "nuslerp": ("weight", "nuslerp_row_wise", "nuslerp_flatten"),
    "passthrough": ("scale",),
    "ram": ("epsilon",),
    "ramplus_tl": ("r", "alpha", "epsilon"),
    "sce": ("select_topk", "int8_mask"),
    "slerp": ("t",),
    "task_arithmetic": _TASK_VECTORS,
    "ties": _TASK_VECTORS,
}
DEMANDED = ("weight", "t")
"""Options that have a default here and none in mergekit."""
WITHOUT_EFFECT = ("int8_mask",)
"""It only saves memory in mergekit: accepted also where the method does not have it."""


def base_is_merged(method: Method | DataMethod, recipe: Recipe | Mapping[str, Any]) -> bool:
    """Whether an unlisted base_model is one more model of a method that has no base.

    As in mergekit, if the recipe gives all models one weight, or if the method is one of mergekit's that have none.
    Otherwise mergekit would stop because the base has no weight; here it gives only its configuration.
    """
    each = {option.name for option in method.options if option.per_model}
    if not each:
        return method.name in MERGEKIT
    return any(each & set(block) for _, block, of_model in parameter_blocks(recipe) if not of_model)


def mergekit_yaml(recipe: Recipe) -> str | None:
    data = as_data(recipe)
    if not _in_mergekit(recipe, data):
        return None
    data.pop("name", None)
    method = ALL_METHODS[recipe.merge_method]
    for option in method.options:
        if option.name in DEMANDED and not _set_by_every_model(data, option.name):
            data["parameters"] = data.get("parameters") or {}
            data["parameters"][option.name] = _completed(data["parameters"].get(option.name), option.default)
    return dump(data)


def _in_mergekit(recipe: Recipe, data: dict[str, Any]) -> bool:
    ours = (recipe.align, recipe.data, recipe.repair, recipe.layer_scale)
    if any(one is not None for one in ours) or recipe.seed or recipe.merge_method not in MERGEKIT:
        return False
    method = ALL_METHODS[recipe.merge_method]
    known = {*MERGEKIT[method.name], *WITHOUT_EFFECT}
    if any(set(block) - known for _, block, _ in parameter_blocks(data)):
        return False
    if any("+" in m.path or "@" in m.path or "+" in (m.adapter or "") for m in recipe.referenced_models()):
        return False  # mergekit would read an adapter or a revision there
    listed = any(entry.model == recipe.base_model for entry in recipe.models or ())
    only_donor = method.base == "ignored" and recipe.base_model is not None and recipe.models is not None and not listed
    return not only_donor or base_is_merged(method, data)


def _set_by_every_model(data: dict[str, Any], option: str) -> bool:
    entries = [e.content for e in walk(data) if e.of_model and e.get("model") != data.get("base_model")]
    return bool(entries) and all(_complete(entry.get("parameters", {}).get(option)) for entry in entries)


def _completed(setting: Any, default: Any) -> Any:
    """The setting with the default said for tensors that no filter matches."""
    if setting is None:
        return default
    return setting if _complete(setting) else [*setting, {"value": default}]


def _complete(setting: Any) -> bool:
    """Whether the setting has a value for every tensor."""
    filters = isinstance(setting, list) and isinstance(setting[0], dict)
    return setting is not None and (not filters or any(one.get("filter") in (None, "*") for one in setting))
