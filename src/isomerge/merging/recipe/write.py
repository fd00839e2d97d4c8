"""Recipes back to YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.definitions import Recipe
from isomerge.merging.recipe.mergekit import DEMANDED, MERGEKIT, WITHOUT_EFFECT
from isomerge.merging.recipe.options import base_is_merged, parameter_blocks


def to_yaml(recipe: Recipe) -> str:
    return _dump(as_data(recipe))


def public_yaml(recipe: Recipe) -> str:
    """The recipe for other people: data is called by its name, without where it lies on this machine."""
    data = as_data(recipe)
    _hide_places(data)
    return _dump(data)


def _hide_places(value: Any) -> None:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "data" and isinstance(one, dict) and "path" in one:
            one["path"] = Path(one["path"]).name
        else:
            _hide_places(one)


def as_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without what is at its default."""
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    for key in ("align", "repair"):
        if getattr(recipe, key) is not None:
            data[key] = data[key] or True
    if recipe.tokenizer is not None:
        data["tokenizer"] = {"source": str(recipe.tokenizer.source), **data["tokenizer"]}
    return data


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
    return _dump(data)


def _in_mergekit(recipe: Recipe, data: dict[str, Any]) -> bool:
    ours = (recipe.align, recipe.data, recipe.repair)
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
    entries = [entry for entry in _model_entries(data) if entry["model"] != data.get("base_model")]
    return bool(entries) and all(_complete(entry.get("parameters", {}).get(option)) for entry in entries)


def _model_entries(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from data.get("models", ())
    for part in data.get("slices", ()):
        yield from part["sources"]
    for module in data.get("modules", {}).values():
        yield from _model_entries(module)


def _completed(setting: Any, default: Any) -> Any:
    """The setting with the default said for tensors that no filter matches."""
    if setting is None:
        return default
    return setting if _complete(setting) else [*setting, {"value": default}]


def _complete(setting: Any) -> bool:
    """Whether the setting has a value for every tensor."""
    filters = isinstance(setting, list) and isinstance(setting[0], dict)
    return setting is not None and (not filters or any(one.get("filter") in (None, "*") for one in setting))


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, (bool, int, float)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _list)


def _dump(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
