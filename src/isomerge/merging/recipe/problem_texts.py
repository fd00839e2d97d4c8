"""What is wrong with the form of a recipe, in plain sentences with the line they are about."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from isomerge.errors import did_you_mean, near_miss
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.definitions import (
    ExpertEntry,
    ModelEntry,
    ModelToken,
    Module,
    OutputSlice,
    Recipe,
    SliceSource,
    TokenizerSettings,
    TokenSettings,
)
from isomerge.merging.recipe.fields import TAG, Conditional
from isomerge.merging.recipe.problem_list import Path, Places, Problems
from isomerge.merging.recipe.settings import AlignSettings, CalibrateSettings, DataSettings, RepairSettings

CONTAINERS: dict[str, tuple[type[BaseModel], str]] = {
    "models": (ModelEntry, "an entry of models"),
    "slices": (OutputSlice, "a slice"),
    "sources": (SliceSource, "a source of a slice"),
    "modules": (Module, "a module"),
    "experts": (ExpertEntry, "an expert"),
    "shared_experts": (ExpertEntry, "a shared expert"),
    "tokenizer": (TokenizerSettings, "tokenizer"),
    "tokens": (TokenSettings, "a token"),
    "source": (ModelToken, "the source of a token"),
    "align": (AlignSettings, "align"),
    "data": (DataSettings, "data"),
    "calibrate": (CalibrateSettings, "calibrate"),
    "repair": (RepairSettings, "repair"),
    "parameters": (Conditional, "a value with a filter"),
}
TOP: tuple[type[BaseModel], str] = (Recipe, "a recipe")
EXTRA_KEYS: dict[type[BaseModel], tuple[str, ...]] = {Recipe: ("tokenizer_source",)}
WANTED = {
    "string_type": "text", "int_type": "a whole number", "int_from_float": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping",
    "model_type": "a mapping", "model_attributes_type": "a mapping",
}  # fmt: skip
MERGEKIT_LEFTOVERS = {"residual_weight": "mergekit reads it and never uses it; remove it"}


def complain(error: ValidationError, places: Places, problems: Problems) -> None:
    """Enter every complaint of pydantic, in our words."""
    for one in error.errors(include_url=False):
        path = tuple(step for step in one["loc"] if not (isinstance(step, str) and step.startswith(TAG)))
        if one["type"] == "too_short" and one["input"]:
            continue  # the entries are wrong, which is told for each
        problems.add(places, path, _sentence(one, path))


def container_of(path: Path) -> tuple[type[BaseModel], str]:
    """The definition that says what may stand at this path, and how to call it."""
    for step in reversed(path):
        if isinstance(step, str) and step in CONTAINERS:
            return CONTAINERS[step]
    return TOP


def allowed_keys(definition: type[BaseModel]) -> list[str]:
    return [*definition.model_fields, *EXTRA_KEYS.get(definition, ())]


def _sentence(one: Any, path: Path) -> str:
    kind, value = one["type"], one["input"]
    name = f"'{path[-1]}'" if path and isinstance(path[-1], str) else "this entry"
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), path[:-1])
    if kind == "missing":
        return f"{container_of(path[:-1])[1]} needs '{path[-1]}'"
    if kind.startswith("union_tag"):
        return "the source of a token is a model, {kind: zero}, or {kind: model_token, model: …, token: …}"
    if kind == "value_error":
        return str(one["ctx"]["error"])
    if kind == "literal_error":
        known = [text.strip("'") for text in one["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return f"{name} cannot be {_shown(value)}. {did_you_mean(str(value), known)}"
    if kind in ("model_type", "model_attributes_type") and isinstance(value, str):
        return _plain_string(value, path)
    if kind in WANTED:
        return f"{name} must be {WANTED[kind]}, and is {_shown(value)}"
    if kind in ("too_short", "string_too_short"):
        return f"{name} is empty"
    if kind.startswith(("greater_than", "less_than")):
        return f"{name} cannot be {_shown(value)}: {one['msg'].replace('Input should be', 'it must be')}"
    return f"{name} cannot be {_shown(value)}: {one['msg']}"


def _plain_string(value: str, path: Path) -> str:
    definition, where = container_of(path)
    if "model" in definition.model_fields:
        return f"{where} is a mapping: write '- model: {value}' instead of '- {value}'"
    return f"{where} must be a mapping with {_listed(allowed_keys(definition))}, and is the text '{value}'"


def _unknown_key(key: str, path: Path) -> str:
    definition, where = container_of(path)
    allowed = allowed_keys(definition)
    text = f"'{key}' is not a key of {where}, which has {_listed(allowed)}."
    if key in MERGEKIT_LEFTOVERS:
        return f"{text} {MERGEKIT_LEFTOVERS[key]}"
    if hint := near_miss(key, allowed):
        return f"{text} {hint}"
    options = {option.name for method in ALL_METHODS.values() for option in method.options}
    if "parameters" in allowed and key in options:
        return f"{text} It is an option of merge methods: put it under 'parameters'"
    homes = [label for other, label in (TOP, *CONTAINERS.values()) if key in allowed_keys(other)]
    return f"{text} It belongs to {' or '.join(homes)}" if homes else text


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "empty"
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
