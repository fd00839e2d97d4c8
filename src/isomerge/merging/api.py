"""`isomerge.merge`: models in, one model out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from isomerge.arguments import SHARED, require_choice, require_types
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.dtypes import dtype_name
from isomerge.checkpoint.open import with_config
from isomerge.choices import ROWS
from isomerge.engine import engine_of
from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.distillation.fresh_student import fresh_student
from isomerge.merging.merge_documents import merge_documents
from isomerge.merging.outcome.estimate import MergePlan, estimate
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.plan.models import open_model, open_models
from isomerge.merging.plan.tensor_plan import TensorExplanation, explain
from isomerge.merging.prepared_models import RunSettings
from isomerge.merging.recipe import ModelReference, Recipe, load_recipe, recipe_of
from isomerge.merging.recipe_data import DataSets
from isomerge.merging.run.option_files import named_statistics
from isomerge.progress_bars import Shown, callback, shows_progress

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Recipe]
"""A path, YAML text (anything with a newline), a dict, or what `load_recipe` gives."""


@shows_progress
def merge(
    models: Sequence[Any],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: Any = None,
    config: Mapping[str, Any] | None = None,
    align: bool | Mapping[str, Any] = False,
    level: str = "full",
    scale: bool | float | Sequence[float] | None = None,
    sweeps: int = 15,
    data: Any = None,
    calibrate: Mapping[str, Any] | None = None,
    repair: bool | Mapping[str, Any] = False,
    layer_scale: str | None = None,
    tokenizer: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    engine: str = "threads",
    address: str | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
    **options: Any,
) -> Merged:
    """Merge models of one architecture; with `align`, each is first moved next to the anchor, unrounded.

    Models are whatever `isomerge.open_checkpoint` takes, and `model+adapter` references. `options` are the method's
    own (`isomerge list methods`): one value for all models or a list with one for each. `config` is the config.json of
    state_dicts, as a dict, which alignment and methods that run models cannot do without. The anchor, and the donor of
    config and side files, is `base` if given, else the first model.

    `data` is what models are run on: a path, batches, opened data, a mapping as in recipes (whose `path` may be any of
    these), or a list with one of these for each model. Methods that need data, alignment and `repair` use it;
    `calibrate` says how models are measured. Options that name files of statistics take `Statistics` too.

    `layer_scale="larv"` scales each model's change in each layer, by what the weights say of it, before it is merged.

    `tokenizer` matches tokens by their text: "union", "base", a model whose tokenizer the result gets, or a mapping as
    in recipes. Without it, models that give tokens different ids are refused; "rows" merges them row by row.

    `level`, `scale` and `sweeps` are those of `isomerge.align`, and `align` may be a mapping with more of its options.
    (A `scale` of numbers is the option of `swag`, `passthrough` and `rebase`, which has a `level` of its own.) `dtype`
    is the dtype of the output, by default that of the inputs, `seed` the seed of methods that draw random numbers.
    `engine="ray"` computes on the cluster at `address` (see docs/cluster.md), with the same bytes. `resume` names the
    folder that `save` will be given: what is solved before that (an alignment, the layers of reconstruct) is kept
    there, and the same call, made again after a kill, goes on from it.

    >>> merged = isomerge.merge(["model-a", "model-b"], method="ties", base="base", density=0.5)
    >>> written = merged.save("merged")
    """
    progress = callback(progress)
    if isinstance(weights, torch.Tensor):
        weights = weights.tolist()
    _check_arguments(
        models, weights, method=(method, str), align=(align, bool, Mapping), level=(level, str),
        scale=(scale, bool, float, list, tuple, None), sweeps=(sweeps, int), calibrate=(calibrate, Mapping, None),
        repair=(repair, bool, Mapping), layer_scale=(layer_scale, str, None),
        tokenizer=(tokenizer, str, os.PathLike, Mapping, None), dtype=(dtype, str, torch.dtype, None),
        seed=(seed, int), resume=(resume, str, os.PathLike, None),
        **_run_arguments(threads, device, max_memory, progress),
    )  # fmt: skip
    require_choice("method", method, ALL_METHODS)
    if options.get("fresh") and base is not None:
        base = fresh_student(base, seed)
    every = with_config(models if base is None else [*models, base], config)
    models, base = (every, None) if base is None else (every[:-1], every[-1])
    if not models:
        raise RequestError("Merging: models is empty. Name at least two models, or one with an adapter on top.")
    if scale is not None and not isinstance(scale, bool):
        options, scale = {"scale": scale, **options}, None
    if level != "full" and not align and any(option.name == "level" for option in ALL_METHODS[method].options):
        options, level = {"level": level, **options}, "full"
    if weights is not None and "weight" in options:
        raise RequestError("Merging: weights and weight mean the same. Leave one of them out.")
    if weights is not None:
        options = {"weight": list(weights), **options}
    options, statistics = named_statistics(options)
    named, origin, checkpoints = named_models(models, base)
    if not align and (level, scale, sweeps) != ("full", None, 15):
        raise RequestError("Merging: level, scale and sweeps have no effect without align=True. Add it, or drop them.")
    shared = {"level": level, "scale": scale, "sweeps": sweeps}
    data_sets = DataSets()
    own = dict(align) if isinstance(align, Mapping) else {}
    if "data" in own:
        own["data"] = data_sets.named(own["data"])
    settings: bool | dict[str, Any] = {**shared, **own} if align else False
    recipe = recipe_of(
        named, method, base=origin, options=options, align=settings, data=data_sets.named(data), calibrate=calibrate,
        repair=repair, layer_scale=layer_scale, tokenizer=_tokenizer(tokenizer), dtype=dtype_name(dtype), seed=seed,
    )  # fmt: skip
    run = RunSettings(
        threads, device, max_memory, progress, data_sets, statistics, resume=resume, engine=engine_of(engine, address)
    )
    return merge_documents([recipe], checkpoints, run, same_ids=tokenizer != ROWS)


@shows_progress
def merge_recipe(
    recipe: RecipeSource,
    *,
    models: Mapping[str, Any] | None = None,
    threads: int | None = None,
    engine: str = "threads",
    address: str | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int | None = None,
    same_ids: bool = False,
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
) -> Merged:
    """Merge as a recipe says: a path, YAML text or a dict. `models` replaces references by state_dicts or modules.

    A recipe without `tokenizer` merges vocabulary tables row by row, with a note if models give tokens different ids;
    with `same_ids` that is an error. `engine`, `address` and `resume` as in `merge`.

    >>> written = isomerge.merge_recipe("recipe.yml").save("merged-by-recipe")
    """
    progress = callback(progress)
    require_types(
        models=(models, Mapping, None), seed=(seed, int, None), same_ids=(same_ids, bool),
        resume=(resume, str, os.PathLike, None), **_run_arguments(threads, device, max_memory, progress),
    )  # fmt: skip
    documents, checkpoints = _opened(recipe, models, seed)
    settings = RunSettings(threads, device, max_memory, progress, resume=resume, engine=engine_of(engine, address))
    return merge_documents(documents, checkpoints, settings, same_ids=same_ids)


def plan(
    recipe: RecipeSource,
    *,
    models: Mapping[str, Any] | None = None,
    threads: int | None = None,
    max_memory: int | str | None = None,
    same_ids: bool = False,
) -> MergePlan:
    """What `merge_recipe` would do with these arguments: tensors, bytes, peak memory, time.

    Only headers are read; data is opened, but no model is run. Everything that is wrong is raised at once.

    >>> isomerge.plan("recipe.yml").peak_memory_bytes > 0
    True
    """
    require_types(
        models=(models, Mapping, None), same_ids=(same_ids, bool),
        **_run_arguments(threads, "cpu", max_memory, None),
    )  # fmt: skip
    return estimate(planned(recipe, models=models, same_ids=same_ids), threads=threads, max_memory=max_memory)


def planned(recipe: RecipeSource, *, models: Mapping[str, Any] | None = None, same_ids: bool = False) -> Merged:
    """The merge as far as headers tell: everything is checked, nothing is aligned or computed."""
    documents, checkpoints = _opened(recipe, models)
    return merge_documents(documents, checkpoints, RunSettings(), solve=False, same_ids=same_ids)


def explain_tensor(recipe: RecipeSource, tensor: str, *, same_ids: bool = False) -> TensorExplanation:
    """The inputs and effective options of one tensor of the last document's output."""
    return explain(planned(recipe, same_ids=same_ids).tensor_plans, tensor)


def _opened(
    recipe: RecipeSource, models: Mapping[str, Any] | None, seed: int | None = None
) -> tuple[list[Recipe], dict[ModelReference, Checkpoint]]:
    """The documents of a recipe, and their models by headers only."""
    if not isinstance(recipe, (str, os.PathLike, Mapping, list, tuple)):
        raise RequestError(f"recipe must be a path, YAML text or a dict, not {recipe!r:.60}.")
    documents = list(recipe) if isinstance(recipe, (list, tuple)) else load_recipe(recipe)
    if not documents or not all(isinstance(document, Recipe) for document in documents):
        raise RequestError("Merging: recipe is a list of other things than recipes. Pass a path, YAML text or a dict.")
    if seed is not None:  # into the recipe, which is what the lock file repeats
        documents = [document.model_copy(update={"seed": seed}) for document in documents]
    given = {ModelReference.parse(reference): model for reference, model in (models or {}).items()}
    checkpoints = open_models(documents, given)
    unknown = sorted(str(reference) for reference in set(given) - set(checkpoints))
    if unknown:
        hint = did_you_mean(unknown[0], [str(reference) for reference in checkpoints])
        raise RequestError(
            f"Merging: models has '{unknown[0]}', which the recipe does not name. {hint}", keys=("models",)
        )
    return documents, checkpoints


def _check_arguments(models: Any, weights: Any, **arguments: tuple[Any, ...]) -> None:
    if isinstance(models, (str, os.PathLike, Mapping)) or not isinstance(models, Iterable):
        raise RequestError("Merging: models must be a list of models, as in merge([a, b]).")
    numbers = isinstance(weights, Iterable) and not isinstance(weights, (str, Mapping))
    if weights is not None and not (numbers and all(isinstance(one, Real) for one in weights)):
        raise RequestError(f"Merging: weights must be a list of numbers, one for each model, not {weights!r:.60}.")
    require_types(**arguments)


def _run_arguments(threads: Any, device: Any, max_memory: Any, progress: Any) -> dict[str, tuple[Any, ...]]:
    """How a merge is run, for `require_types`."""
    return {
        "threads": (threads, int, None),
        "device": (device, str),
        "max_memory": (max_memory, int, str, None),
        "progress": (progress, *SHARED["progress"]),
    }


def _tokenizer(given: str | os.PathLike[str] | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """As a recipe says it."""
    return None if given == ROWS else os.fspath(given) if isinstance(given, os.PathLike) else given


def named_models(
    models: Sequence[Any], base: Any = None
) -> tuple[list[ModelReference], ModelReference | None, dict[ModelReference, Checkpoint]]:
    """How a recipe names these models and their base, and all of them opened. One that is given as an object may be
    there twice."""
    if absent := [place for place, model in enumerate(models, start=1) if model is None]:
        raise RequestError(f"Merging: model {absent[0]} of {len(models)} is None. Pass a model, or leave it out.")
    named: list[ModelReference] = []
    for place, model in enumerate(models, start=1):
        reference = _reference(model, f"model {place}")
        if reference in named and not isinstance(model, (str, Path)):
            reference = ModelReference(f"model {place}")
        named.append(reference)
    given = dict(zip(named, models, strict=True))
    same = next((reference for reference, model in zip(named, models, strict=True) if model is base), None)
    origin = same or (_reference(base, "base") if base is not None else None)
    if origin is not None:
        given.setdefault(origin, base)
    return named, origin, {reference: open_model(reference, model) for reference, model in given.items()}


def _reference(model: Any, otherwise: str) -> ModelReference:
    """How a recipe calls a model that was given as an object."""
    if isinstance(model, ModelReference):
        return model
    if isinstance(model, (str, Path)):
        return ModelReference.parse(str(model))
    return ModelReference(getattr(model, "name", None) or otherwise)
