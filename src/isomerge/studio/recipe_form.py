"""A recipe as a form and as YAML text. The text is what counts: the form shows the part of it that it has fields for,
and writes that part only."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from isomerge import yaml_files
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe.document import dump


class FormModel(BaseModel):
    """A model of the form, and its weight."""

    model: str
    weight: str = ""


class RecipeForm(BaseModel):
    """What the form has fields for. Numbers are texts, as they are typed."""

    method: str = "linear"
    base: str = ""
    align: str = ""
    """A level, or nothing."""
    models: list[FormModel] = []
    options: dict[str, str] = {}
    """Those of the method, for all models."""


def methods() -> list[dict[str, Any]]:
    """What the form offers: every method with its options."""
    return [
        {
            "name": name,
            "summary": method.summary,
            "base": method.base,
            "options": [{"name": one.name, "help": one.help, "default": _default(one)} for one in method.options],
        }
        for name, method in sorted(ALL_METHODS.items())
    ]


def _default(option: Any) -> str:
    value = option.default[0] if isinstance(option.default, list) and len(option.default) == 1 else option.default
    return _text(value) if isinstance(value, (bool, int, float, str)) else ""


def read_form(text: str) -> RecipeForm | None:
    """The form of a recipe; None for a text that has no form, such as slices or several documents."""
    data = _mapping(text)
    if data is None or not _has_form(data):
        return None
    align = data.get("align")
    level = align.get("level", "full") if isinstance(align, dict) else "full" if align else ""
    return RecipeForm(
        method=data.get("merge_method") or "linear",
        base=data.get("base_model") or "",
        align=level if isinstance(level, str) else "full",
        models=[
            FormModel(model=entry["model"], weight=_text((entry.get("parameters") or {}).get("weight")))
            for entry in data.get("models") or ()
        ],
        options={str(key): _text(value) for key, value in (data.get("parameters") or {}).items()},
    )


def write_form(text: str, form: RecipeForm) -> str:
    """The text with what the form says; keys that the form has no field for stay. Comments do not."""
    data = _mapping(text) or {}
    before = {entry["model"]: entry for entry in data.get("models") or () if _is_entry(entry)}
    data |= {
        "merge_method": form.method,
        "base_model": form.base or None,
        "models": [_entry(one, before.get(one.model, {})) for one in form.models],
        "parameters": {key: _value(given) for key, given in form.options.items() if given.strip()},
        "align": _align(data.get("align"), form.align),
    }
    order = ("merge_method", "base_model", "models", "parameters", "align")
    keys = [*order, *(key for key in data if key not in order)]
    return dump({key: data[key] for key in keys if data[key] not in (None, {}, False) or key == "models"})


def _entry(given: FormModel, before: dict[str, Any]) -> dict[str, Any]:
    parameters = {key: value for key, value in (before.get("parameters") or {}).items() if key != "weight"}
    if given.weight.strip():
        parameters = {"weight": _value(given.weight), **parameters}
    rest = {key: value for key, value in before.items() if key not in ("model", "parameters")}
    return {"model": given.model, **({"parameters": parameters} if parameters else {}), **rest}


def _align(before: Any, level: str) -> Any:
    if not level:
        return None
    others = {key: value for key, value in before.items() if key != "level"} if isinstance(before, dict) else {}
    return {"level": level, **others}


def _mapping(text: str) -> dict[str, Any] | None:
    """The only document, if it is a mapping; an empty text is an empty one."""
    if not text.strip():
        return {}
    try:
        data = yaml_files.load(text)
    except yaml.YAMLError:
        return None
    return data if isinstance(data, dict) else None


def _has_form(data: dict[str, Any]) -> bool:
    texts = (data.get(key, "") or "" for key in ("merge_method", "base_model"))
    models = data.get("models") or []
    return (
        not {"slices", "modules"} & set(data)
        and all(isinstance(one, str) for one in texts)
        and isinstance(models, list)
        and all(map(_is_entry, models))
        and isinstance(data.get("parameters") or {}, dict)
    )


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("model"), str)
        and isinstance(entry.get("parameters") or {}, dict)
    )


def _value(text: str) -> Any:
    """What a typed value is in YAML; a text that is none stays, for the validation to complain about."""
    try:
        return yaml_files.load(text)
    except yaml.YAMLError:
        return text


def _text(value: Any) -> str:
    if value is None:
        return ""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
