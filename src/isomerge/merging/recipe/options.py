"""A recipe against its merge method: which options there are, what values they take, how many models it wants.

Works on data as it was written, so that these problems are found together with those of form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isomerge.errors import did_you_mean, near_miss
from isomerge.merging.data_methods import ALL_METHODS, DataMethod
from isomerge.merging.methods import Method, Option
from isomerge.merging.methods.method import REQUIRED
from isomerge.merging.recipe.data_rules import check_data
from isomerge.merging.recipe.definitions import not_exactly_one
from isomerge.merging.recipe.entries import parameter_blocks, walk
from isomerge.merging.recipe.mergekit import WITHOUT_EFFECT, base_is_merged
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Path, Places, Problems

AnyMethod = Method | DataMethod


def check_method(data: dict[str, Any], places: Places, problems: Problems) -> None:
    """Enter what does not fit the method. Values are turned into what their option wants, in place."""
    _one_kind_of_input(data, places, problems)
    name = data.get("merge_method")
    if not isinstance(name, str) or not name:
        return
    if name not in ALL_METHODS:
        problems.add(places, ("merge_method",), f"'{name}' is not a merge method. {did_you_mean(name, ALL_METHODS)}")
        return
    method = ALL_METHODS[name]
    _check_options(method, data, places, problems)
    _check_models(method, data, places, problems)
    if data.get("layer_scale") is not None and method.base != "required":
        text = (
            f"'layer_scale' scales what models add to a base, and {name} merges models without one; see task_arithmetic"
        )
        problems.add(places, ("layer_scale",), text)
    check_data(method, data, places, problems)


def _one_kind_of_input(data: Mapping[str, Any], places: Places, problems: Problems) -> None:
    for entry in walk(data):
        keys = {"recipe": ("models", "slices", "modules"), "module": ("models", "slices")}.get(entry.kind)
        if keys and (problem := not_exactly_one(entry.content, keys)):
            problems.add(places, entry.path, problem)


# --- options ----------------------------------------------------------------------------------------------------------
def _check_options(method: AnyMethod, data: dict[str, Any], places: Places, problems: Problems) -> None:
    known = {option.name: option for option in method.options}
    for _, block, _ in parameter_blocks(data):
        for old, new in (method.old_options if isinstance(method, DataMethod) else {}).items():
            if old in block and new not in block:
                block[new] = block.pop(old)
    given = set()
    for path, block, of_model in parameter_blocks(data):
        for key in block:
            given.add(key)
            here = (*path, key)
            option = known.get(key)
            if option is None:
                if key not in WITHOUT_EFFECT:
                    problems.add(places, here, _no_such_option(method, key))
            elif of_model and not option.per_model:
                problems.add(
                    places, here, f"'{key}' of {method.name} is one value for all models: move it from the model to "
                    "the 'parameters' of the recipe, the slice or the module",
                )  # fmt: skip
            elif isinstance(method, DataMethod) and isinstance(block[key], (dict, list)):
                text = f"'{key}' of {method.name} holds for the whole model: write one value, no gradient and no filter"
                problems.add(places, here, text)
            else:
                block[key] = _read_setting(option, block[key], here, places, problems)
    for option in method.options:
        if option.default is REQUIRED and option.name not in given:
            problems.add(places, ("merge_method",), f"{method.name} needs the option '{option.name}': {option.help}")


def _no_such_option(method: AnyMethod, key: str) -> str:
    names = [option.name for option in method.options]
    if not names:
        return f"{method.name} has no options, and '{key}' is given"
    hint = near_miss(key, names)
    known = f", which has {', '.join(names)}. {hint}" if hint else f". {did_you_mean(key, names)}"
    return f"'{key}' is not an option of {method.name}{known}"


def _read_setting(option: Option, raw: Any, path: Path, places: Places, problems: Problems) -> Any:
    """The setting with every number a number; `1e-3` is text in YAML 1.1."""
    if isinstance(raw, dict):
        if "value" in raw:
            raw["value"] = _read_setting(option, raw["value"], (*path, "value"), places, problems)
        return raw
    if isinstance(raw, (list, tuple)):
        return [_read_setting(option, one, (*path, i), places, problems) for i, one in enumerate(raw)]
    value = read_value(option, raw)
    if value is WRONG:
        nothing = " or null" if option.nullable else ""
        shown = "empty" if raw is None else f"'{raw}'" if isinstance(raw, str) else str(raw).lower()
        large = isinstance(raw, (int, float)) and abs(raw) > LARGEST
        most = f" of at most {LARGEST:g}" if large else ""
        shown = f"{shown[:20]}, which is too large" if large else shown
        problems.add(places, path, f"'{option.name}' must be {KINDS[option.kind]}{most}{nothing}, and is {shown}")
        return raw
    if wrong := option.problem(value):
        problems.add(places, path, wrong)
    return value


KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
WRONG = object()
LARGEST = 3.4e38
"""Of an option's value: the largest number of float32, which merges are computed in."""


def read_value(option: Option, raw: Any) -> Any:
    """One value as its option wants it, or WRONG."""
    if raw is None:
        return None if option.nullable else WRONG
    if option.kind is bool:
        return bool(raw) if isinstance(raw, (bool, int, float)) and raw in (0, 1) else WRONG
    if option.kind is str:
        is_size = isinstance(raw, int) and not isinstance(raw, bool)  # `cache: 0` is `cache: "0"`
        return str(raw) if is_size or isinstance(raw, str) else WRONG
    if isinstance(raw, bool):
        return WRONG
    try:
        number = float(raw)
    except (TypeError, ValueError, OverflowError):
        return WRONG
    if not abs(number) <= LARGEST:
        return WRONG
    if option.kind is int:
        return int(number) if number.is_integer() else WRONG
    return number


# --- models -----------------------------------------------------------------------------------------------------------
def _check_models(method: AnyMethod, data: dict[str, Any], places: Places, problems: Problems) -> None:
    base = ModelReference.read(data.get("base_model"))
    slice_bases = [entry.get("base_model") for entry in walk(data) if entry.kind == "slice"]
    own = bool(slice_bases) and None not in slice_bases
    if method.base == "required" and data.get("base_model") is None and not own:
        text = f"{method.name} needs 'base_model', the model the others came from"
        problems.add(places, ("merge_method",), text, missing="base_model")
    for path, models, local_base, listed in _groups(data, base):
        _check_twice(models, path, places, problems)
        own_base = local_base if method.base != "ignored" else None
        if listed is False and own_base is not None and own_base not in models.values():
            problems.add(
                places, path, f"the base model {own_base} is not among the sources of this slice, and {method.name} "
                "needs its layers: add it with a layer_range",
            )  # fmt: skip
        count = sum(model != own_base for model in models.values())
        if listed and method.base == "ignored" and base is not None and base not in models.values():
            count += base_is_merged(method, data)
        _check_count(method, count, own_base is not None, path, places, problems)


def _groups(
    data: Mapping[str, Any], base: ModelReference | None
) -> Iterator[tuple[Path, dict[int, ModelReference], ModelReference | None, bool]]:
    """What is merged together: path, the models by position, their base, and whether the base may be left out."""
    for entry in walk(data):
        key = {"recipe": "models", "module": "models", "slice": "sources"}.get(entry.kind)
        models = _models(entry.get(key)) if key else None
        if models is not None and entry.kind == "slice":
            yield (*entry.path, "sources"), models, ModelReference.read(entry.get("base_model")) or base, False
        elif models is not None:
            yield (*entry.path, "models"), models, base, True


def _models(entries: Any) -> dict[int, ModelReference] | None:
    """By position; None when the form is wrong, which is said elsewhere."""
    if not isinstance(entries, list) or not entries:
        return None
    models = {i: ModelReference.read(entry.get("model")) for i, entry in enumerate(entries) if isinstance(entry, dict)}
    if len(models) != len(entries):
        return None
    return {i: model for i, model in models.items() if model is not None} if all(models.values()) else None


def _check_twice(models: Mapping[int, ModelReference], path: Path, places: Places, problems: Problems) -> None:
    first: dict[ModelReference, int] = {}
    for i, model in models.items():
        if model in first:
            earlier = places.where((*path, first[model]))
            problems.add(
                places, (*path, i), f"{model} is here twice, first at {earlier}; give it the sum of the weights"
            )
        first.setdefault(model, i)


FOR_MORE = {
    "slerp": "; karcher and multislerp do the same for more",
    "nuslerp": "; karcher and multislerp do the same for more",
    "nearswap": "; linear and ties merge more",
    "arcee_fusion": "; ties and sce merge more",
}
"""Methods of one pair, and what to use where there are more models."""


def _check_count(
    method: AnyMethod, count: int, with_base: bool, path: Path, places: Places, problems: Problems
) -> None:
    beside = " besides the base" if with_base or method.base == "required" else ""
    if count < method.least or (method.most is not None and count > method.most):
        if method.most == method.least:
            wanted = f"exactly {method.least}"
        elif count < method.least:
            wanted = f"at least {method.least}"
        else:
            wanted = f"at most {method.most}"
        noun = "model" if wanted.endswith(" 1") else "models"
        more = FOR_MORE.get(method.name, "") if count > method.least else ""
        here = f"here {'is' if count == 1 else 'are'} {count}"
        problems.add(places, path, f"{method.name} merges {wanted} {noun}{beside}, and {here}{more}")
