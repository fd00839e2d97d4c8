"""`load_recipe`: a file, a text or data in; recipes out, or one error with everything that is wrong."""

from __future__ import annotations

import codecs
import copy
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from isomerge.arguments import usable_path
from isomerge.checkpoint.local import broken_link
from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.data_methods import ALL_METHODS, DataMethod
from isomerge.merging.recipe.definitions import ModelToken, Recipe, TokenSettings
from isomerge.merging.recipe.document import read_documents
from isomerge.merging.recipe.expert_rules import check_experts, move_experts
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.options import check_method
from isomerge.merging.recipe.problem_list import Path, Places, Problems
from isomerge.merging.recipe.problem_texts import complain
from isomerge.yaml_files import LARGEST

EXAMPLE = "merge_method: linear, and models: with entries '- model: PATH'"


def load_recipe(source: str | os.PathLike[str] | Mapping[str, Any]) -> list[Recipe]:
    """One recipe per document, in the order they are to be made: the last is the output.

    `source` is a path, YAML text (anything with a newline) or a mapping.

    >>> recipes = load_recipe("merge_method: linear\\nmodels: [{model: a}, {model: b}]\\n")
    >>> [str(model) for model in recipes[0].referenced_models()]
    ['a', 'b']
    """
    if isinstance(source, Mapping):
        documents: list[tuple[Any, Places]] = [(source, Places())]
        problems = Problems("reading the recipe")
    else:
        text, label = _text(source)
        problems = Problems(f"reading {label}")
        documents = read_documents(text, label, problems)
        if not documents and not problems.found:
            problems.general(f"there is nothing in it. A recipe has at least {EXAMPLE}")
    recipes = [_recipe(data, places, problems) for data, places in documents]
    _check_names(documents, problems)
    problems.raise_if_any()
    return _in_order([recipe for recipe in recipes if recipe is not None], problems)


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(source)
    if isinstance(source, str) and "\n" in source:
        return text, "the recipe"
    file = usable_path(source, "reading the recipe")
    if file.name == "config.json" and file.is_file():
        raise RequestError(
            f"While reading the recipe {text}: it describes a model. Models are named by their folders, two or more at "
            "a time."
        )
    try:
        with file.open("rb") as content:  # a device has no end; what is longer than this is refused as YAML
            return _decoded(content.read(4 * LARGEST)), text
    except FileNotFoundError:
        why = "there is no such file. Check the path"
        if file.is_symlink():
            why = f"{broken_link(file)}. Repair the link, or name the file itself"
    except IsADirectoryError:
        why = "it is a folder. Name the YAML file in it; models are named two or more at a time"
    except PermissionError:
        why = "it may not be read. Give yourself the right to (chmod u+r), or copy it"
    except UnicodeDecodeError as error:
        why = (
            f"it is no text in {error.encoding.upper()} (byte {error.start + 1} is 0x{error.object[error.start]:02x}). "
            "Save it as UTF-8 in your editor; or, if it is no YAML at all, name the file that is"
        )
    except OSError as error:
        cause = broken_link(file) if file.is_symlink() else error.strerror or error
        why = f"{cause}. Name a YAML file that can be read"
    raise RequestError(f"While reading the recipe {text}: {why}.")


def _decoded(content: bytes) -> str:
    """YAML is UTF-8 or UTF-16; some editors and shells write the latter, with a mark in front."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if encoding != "utf-16" and (zero := content.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", content, zero, zero + 1, "text has no zero bytes")
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding).read()  # with line ends as a file's


def _recipe(data: Any, places: Places, problems: Problems) -> Recipe | None:
    if not isinstance(data, Mapping):
        kind = "a list" if isinstance(data, list) else f"the text {' '.join(str(data).split())!r:.60}"
        problems.add(places, (), f"a recipe is a mapping with {EXAMPLE}, and this is {kind}")
        return None
    plain = _plain(data)
    before = len(problems.found)
    _move_tokenizer_source(plain, places, problems)
    move_experts(plain, places, problems)
    check_method(plain, places, problems)
    recipe = None
    try:
        recipe = Recipe.model_validate(plain).placed(places)
    except ValidationError as error:
        complain(error, places, problems)
    if recipe is not None:
        _check_references(recipe, problems)
        check_experts(recipe, problems)
    return recipe if len(problems.found) == before else None


def _plain(value: Any) -> Any:
    """A copy to work on, so that the caller's data stays as it is."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return copy.copy(value)


def _move_tokenizer_source(data: dict[str, Any], places: Places, problems: Problems) -> None:
    """`tokenizer_source: X` is short for `tokenizer: {source: X}`."""
    if "tokenizer_source" not in data:
        return
    source = data.pop("tokenizer_source")
    here: Path = ("tokenizer_source",)
    if data.get("tokenizer") is not None:
        problems.add(places, here, "'tokenizer_source' is short for 'tokenizer: {source: …}', and both are given")
    elif source is not None:
        data["tokenizer"] = {"source": source}
        if (line := places.line(here)) is not None:
            places.lines[("tokenizer", "source")] = line


def _check_references(recipe: Recipe, problems: Problems) -> None:
    """Places that name a model which must be one of those that are merged."""
    known = recipe.referenced_models()
    for path, model in _models_named_elsewhere(recipe):
        if model not in known:
            text = f"{model} is not one of the models of this recipe. {did_you_mean(str(model), map(str, known))}"
            problems.add(recipe.places, path, text)
    if recipe.tokenizer and recipe.tokenizer.source == "base" and recipe.base_model is None:
        problems.add(
            recipe.places, ("tokenizer", "source"), "the tokenizer of the base is wanted, and there is no 'base_model'",
            missing="base_model",
        )  # fmt: skip


def _models_named_elsewhere(recipe: Recipe) -> Iterator[tuple[Path, ModelReference]]:
    if recipe.align and recipe.align.anchor:
        yield ("align", "anchor"), recipe.align.anchor
    tokens: Mapping[str, TokenSettings] = (recipe.tokenizer.tokens if recipe.tokenizer else None) or {}
    for token, setting in tokens.items():
        path: Path = ("tokenizer", "tokens", token, "source")
        if isinstance(setting.source, ModelToken):
            yield (*path, "model"), setting.source.model
        elif isinstance(setting.source, ModelReference):
            yield path, setting.source


# --- several documents ------------------------------------------------------------------------------------------------
def _check_names(documents: list[tuple[Any, Places]], problems: Problems) -> None:
    first: dict[Any, str] = {}
    for data, places in documents:
        if not isinstance(data, Mapping):
            continue
        name = data.get("name")
        if name is not None and not isinstance(name, str):
            continue  # what is wrong with it is said elsewhere
        if name in first:
            what = (
                f"the name '{name}' is taken by the document at" if name else "only one document may have no name; see"
            )
            problems.add(places, ("name",), f"{what} {first[name]}")
        first.setdefault(name, places.where(("name",)))


def _in_order(recipes: list[Recipe], problems: Problems) -> list[Recipe]:
    """A document comes after those it uses; the one without a name, or the last, is the output."""
    by_name = {recipe.name: recipe for recipe in recipes if recipe.name}
    output = next((recipe for recipe in recipes if recipe.name is None), recipes[-1])
    ordered: list[Recipe] = []
    open_names: list[str | None] = []

    def add(recipe: Recipe) -> None:
        if any(recipe is done for done in ordered):
            return
        if recipe.name in open_names:
            circle = " → ".join(str(name) for name in [*open_names[open_names.index(recipe.name) :], recipe.name])
            problems.add(recipe.places, ("name",), f"these documents use each other in a circle: {circle}")
            return
        open_names.append(recipe.name)
        for model in recipe.referenced_models():
            if model.path in by_name:
                add(by_name[model.path])
        open_names.pop()
        ordered.append(recipe)

    for recipe in recipes:
        if recipe is not output:
            add(recipe)
    if any(recipe is output for recipe in ordered):
        text = f"'{output.name}' is the last document and so the output, but another document uses it"
        problems.add(output.places, ("name",), f"{text}; put the output last")
    add(output)
    problems.raise_if_any()
    return ordered


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
    layer_scale: str | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Recipe:
    """The recipe that the equivalent YAML gives.

    An option's value holds for all models; a list gives an option that every model has for itself one value per model,
    in the order of `models`, and is a gradient over the layers for any other option. `data` is a path, a mapping, or a
    list with one of these for each model (and last that of the task, for a method that compares them). Of two models
    for a method that goes from a base to one other (`slerp`), the first is the base where none is named.

    >>> recipe = recipe_of(["a", "b"], "linear", options={"weight": [0.3, 0.7]})
    >>> recipe.models[1].parameters
    {'weight': 0.7}
    """
    entries: list[dict[str, Any]] = [{"model": _reference(model)} for model in models]
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
    known = ALL_METHODS.get(method)
    if isinstance(data, (list, tuple)):
        of_task = isinstance(known, DataMethod) and known.data == "task"
        if len(data) != len(entries) + of_task:
            last = ", and last that of the task" if of_task else ""
            raise RequestError(
                f"Merging: there are {len(data)} data sets for {len(entries)} models. Give "
                f"{'' if of_task else 'one for all, or '}one for each in their order{last}."
            )
        for entry, own in zip(entries, data[: len(entries)], strict=True):
            entry["data"] = own
        data = data[-1] if of_task else None
    if base is None and len(models) == 2 and known is not None and known.base == "required" and known.most == 1:
        base = models[0]
    content = {
        "name": name, "merge_method": method, "base_model": None if base is None else _reference(base),
        "models": entries, "parameters": shared or None, "dtype": dtype, "out_dtype": out_dtype,
        "chat_template": chat_template,
        "align": align, "data": data, "calibrate": calibrate, "repair": repair, "seed": seed,
        "layer_scale": layer_scale,
        "tokenizer": {"source": tokenizer} if isinstance(tokenizer, str) else tokenizer,
    }  # fmt: skip
    (recipe,) = load_recipe({key: value for key, value in content.items() if value is not None})
    return recipe


def _reference(model: str | os.PathLike[str] | ModelReference) -> str | ModelReference:
    return model if isinstance(model, ModelReference) else os.fspath(model)
