"""Recipes back to YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from isomerge.merging.recipe.definitions import Recipe


def to_yaml(recipe: Recipe) -> str:
    return dump(as_data(recipe))


def public_yaml(recipe: Recipe) -> str:
    """The recipe for other people: data is called by its name, without where it lies on this machine."""
    data = as_data(recipe)
    _hide_places(data)
    return dump(data)


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


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, (bool, int, float)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _list)


def dump(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
