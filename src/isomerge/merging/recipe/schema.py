"""The JSON Schema of recipes, for editors: made from the definitions and the methods, shipped as schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isomerge.merging.data_methods import ALL_METHODS, DataMethod
from isomerge.merging.methods import Method, Option
from isomerge.merging.methods.method import REQUIRED
from isomerge.merging.recipe.definitions import Recipe
from isomerge.merging.recipe.mergekit import WITHOUT_EFFECT

FILE = Path(__file__).with_name("schema.json")
TYPES = {float: "number", int: "integer", bool: "boolean", str: "string"}


def schema() -> dict[str, Any]:
    """Draft 2020-12. Every method's options are allowed where that method is named."""
    json_schema = Recipe.model_json_schema()
    properties = json_schema["properties"]
    properties["merge_method"] = {
        "description": "How tensors are merged.",
        "oneOf": [{"const": name, "description": ALL_METHODS[name].summary} for name in sorted(ALL_METHODS)],
    }
    source = json_schema["$defs"]["TokenizerSettings"]["properties"]["source"]
    properties["tokenizer_source"] = {**source, "description": "Short for tokenizer: {source: …}."}
    for key in ("align", "repair"):
        properties[key]["anyOf"].append({"type": "boolean"})
    for holder in (json_schema, *(json_schema["$defs"][name] for name in ("ModelEntry", "AlignSettings"))):
        path = {"type": "string", "minLength": 1}
        holder["properties"]["data"]["anyOf"].append(path)
    definitions = json_schema["$defs"]
    for kind in TYPES:
        definitions |= {_setting_name(kind, nullable): _setting(kind, nullable) for nullable in (False, True)}
    for name in sorted(ALL_METHODS):
        definitions[f"options-{name}"] = _options(ALL_METHODS[name], of_model=False)
        definitions[f"model-options-{name}"] = _options(ALL_METHODS[name], of_model=True)
    json_schema["allOf"] = [_where(name) for name in sorted(ALL_METHODS)]
    kinds = ("models", "slices", "modules")
    json_schema["oneOf"] = [{"required": [kind]} for kind in kinds]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema, "title": "A recipe of isomerge"}


def text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _options(method: Method | DataMethod, *, of_model: bool) -> dict[str, Any]:
    options = [option for option in method.options if option.per_model or not of_model]
    whole = isinstance(method, DataMethod)
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {o.name: _option(o, varies=not whole) for o in options}
        | {name: {"type": "boolean"} for name in WITHOUT_EFFECT if name not in {o.name for o in options}},
    }


def _option(option: Option, *, varies: bool) -> dict[str, Any]:
    """`varies`: over the layers, or with the tensor's name."""
    entry: dict[str, Any] = {"description": option.help}
    entry |= (
        {"$ref": f"#/$defs/{_setting_name(option.kind, option.nullable)}"}
        if varies
        else _value(option.kind, option.nullable)
    )
    return entry if option.default is REQUIRED else {**entry, "default": option.default}


def _setting_name(kind: type, nullable: bool) -> str:
    return f"setting-{TYPES[kind]}" + ("-or-null" if nullable else "")


def _value(kind: type, nullable: bool) -> dict[str, Any]:
    return {"type": [TYPES[kind], "null"] if nullable else TYPES[kind]}


def _setting(kind: type, nullable: bool) -> dict[str, Any]:
    """A value, a gradient, a value with a filter or a list of these."""
    one = _value(kind, nullable)
    values = [one, {"type": "array", "items": one, "minItems": 1}]
    filtered = {
        "type": "object",
        "additionalProperties": False,
        "required": ["value"],
        "properties": {"filter": {"type": ["string", "null"]}, "value": {"anyOf": values}},
    }
    return {"anyOf": [*values, filtered, {"type": "array", "items": filtered, "minItems": 1}]}


def _where(method: str) -> dict[str, Any]:
    """The places of a recipe where a method's options may stand."""
    shared = {"$ref": f"#/$defs/options-{method}"}
    each = {"$ref": f"#/$defs/model-options-{method}"}
    entries = {"type": ["array", "null"], "items": {"properties": {"parameters": each}}}
    slices = {"type": ["array", "null"], "items": {"properties": {"parameters": shared, "sources": entries}}}
    inside = {"parameters": shared, "models": entries, "slices": slices}
    modules = {"type": ["object", "null"], "additionalProperties": {"properties": inside}}
    return {
        "if": {"properties": {"merge_method": {"const": method}}, "required": ["merge_method"]},
        "then": {"properties": {**inside, "modules": modules}},
    }
