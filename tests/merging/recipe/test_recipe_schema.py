"""The schema for editors is what the definitions say, and accepts and refuses what the reader does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.schema import FILE, text

SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
KINDS = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip


def test_the_shipped_schema_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run: python docs/generate.py"


def test_every_method_and_option_is_described() -> None:
    offered = {one["const"]: one["description"] for one in SCHEMA["properties"]["merge_method"]["oneOf"]}
    assert offered == {name: method.summary for name, method in ALL_METHODS.items()}
    for name, method in ALL_METHODS.items():
        properties = SCHEMA["$defs"][f"options-{name}"]["properties"]
        for option in method.options:
            assert properties[option.name]["description"] == option.help


def test_every_reference_leads_somewhere() -> None:
    used = set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', FILE.read_text(encoding="utf-8")))
    assert used and used <= set(SCHEMA["$defs"])


def fits(value: Any, schema: Any) -> bool:
    """The keywords of JSON Schema that the schema uses, written down once more by hand."""
    if "$ref" in schema and not fits(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]):
        return False
    if "if" in schema and fits(value, schema["if"]) and not fits(value, schema["then"]):
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, KINDS[k]) and (k == "boolean") >= isinstance(value, bool) for k in kinds):
        return False
    checks = [
        "const" not in schema or value == schema["const"],
        "enum" not in schema or value in schema["enum"],
        all(fits(value, one) for one in schema.get("allOf", [])),
        "anyOf" not in schema or any(fits(value, one) for one in schema["anyOf"]),
        "oneOf" not in schema or sum(fits(value, one) for one in schema["oneOf"]) == 1,
    ]
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        checks += [key in value for key in schema.get("required", [])]
        checks += [fits(one, known[key]) for key, one in value.items() if key in known]
        checks += [
            rest is not False and (rest is True or fits(one, rest)) for key, one in value.items() if key not in known
        ]
    if isinstance(value, list):
        checks += [len(value) >= schema.get("minItems", 0), *(fits(one, schema.get("items", {})) for one in value)]
    if isinstance(value, str):
        checks.append(len(value) >= schema.get("minLength", 0))
    if isinstance(value, (int, float)):
        checks.append(value >= schema.get("minimum", value))
    return all(checks)


GOOD = [
    "{merge_method: linear, models: [{model: a}], tokenizer_source: union, align: true}",
    "{merge_method: slerp, base_model: a, models: [{model: b}], parameters: {t: [{filter: mlp, value: [0, 1]}]}}",
    "{merge_method: ties, slices: [{sources: [{model: a, layer_range: [0, 1], parameters: {weight: 1}}]}]}",
    "{merge_method: linear, modules: {x: {models: [{model: a}], parameters: {weight: {value: 1}}}}}",
    "{merge_method: linear, models: [{model: a}], tokenizer: {tokens: {x: {source: {kind: zero}}, y: {source: a}}}}",
    "{merge_method: passthrough, models: [{model: a, parameters: {scale: null}}]}",
    "{merge_method: reconstruct, models: [{model: a}], data: x.csv, parameters: {ridge: 0.1}, repair: true}",
    "{merge_method: fisher, models: [{model: a, data: {path: x, limit: 5}}], calibrate: {fisher: empirical}}",
    "{merge_method: linear, models: [{model: a}], data: {path: x, label: 2}, align: {evidence: {residual: mix}}}",
]
BAD = [
    "{merge_method: linaer, models: [{model: a}]}",
    "{merge_method: linear}",
    "{merge_method: linear, models: [a]}",
    "{merge_method: linear, models: [{model: a}], slices: []}",
    "{merge_method: linear, models: [{model: a}], parameters: {density: 1}}",
    "{merge_method: linear, models: [{model: a, parameters: {normalize: true}}]}",
    "{merge_method: linear, models: [{model: a}], parameters: {weight: yes}}",
    "{merge_method: linear, models: [{model: a}], parameters: {weight: [{filtre: mlp, value: 1}]}}",
    "{merge_method: linear, models: [{model: a}], align: {level: ful}}",
    "{merge_method: linear, models: [{model: a}], algin: true}",
    "{merge_method: reconstruct, models: [{model: a}], data: {pth: x}}",
    "{merge_method: reconstruct, models: [{model: a}], data: x, parameters: {ridge: [0, 1]}}",
    "{merge_method: reconstruct, models: [{model: a}], data: {path: x, kind: image}}",
    "{merge_method: linear, models: [{model: a}], align: {evidence: some}}",
    "{merge_method: linear, models: [{model: a}], tokenizer: {tokens: {x: {source: {kind: zeros}}}}}",
]


@pytest.mark.parametrize("recipe", GOOD)
def test_the_schema_accepts_recipes(recipe: str) -> None:
    assert fits(yaml.safe_load(recipe), SCHEMA)


@pytest.mark.parametrize("recipe", BAD)
def test_the_schema_refuses_mistakes(recipe: str) -> None:
    assert not fits(yaml.safe_load(recipe), SCHEMA)
