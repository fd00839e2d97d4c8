"""`isomerge.merge`: models in, one model out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.checkpoint import Checkpoint, require_floating
from isomerge.errors import RequestError, did_you_mean
from isomerge.evaluation.device import require_device
from isomerge.merging.combine import combine
from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.differences import differences, left_out_adapters
from isomerge.merging.extras import named_statistics
from isomerge.merging.measured import name_uneven
from isomerge.merging.merged import Merged, Progress, as_checkpoint
from isomerge.merging.opening import open_model, open_models
from isomerge.merging.prepare import foresee, prepare
from isomerge.merging.recipe import ModelReference, Recipe, load_recipe, plan_tensors, recipe_of
from isomerge.merging.recipe_data import DataSets
from isomerge.merging.roles import base_among_models
from isomerge.merging.settings import RunSettings
from isomerge.merging.strangers import name_strangers
from isomerge.merging.tokens import ROWS, require_same_ids


def merge(
    models: Sequence[Any],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: Any = None,
    align: bool | Mapping[str, Any] = False,
    level: str = "full",
    scale: bool | None = None,
    sweeps: int = 15,
    data: Any = None,
    calibrate: Mapping[str, Any] | None = None,
    repair: bool | Mapping[str, Any] = False,
    tokenizer: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Merged:
    """Merge models of one architecture; with `align`, each is first moved next to the anchor, unrounded.

    Models are folders, files, hub ids, `model+adapter` references, state_dicts or modules. `options` are the method's
    own (`isomerge list methods`): one value for all models or a list with one for each. The anchor, and the donor of
    config and side files, is `base` if given, else the first model.

    `data` is what models are run on: a path, batches, opened data, a mapping as in recipes (whose `path` may be any of
    these), or a list with one of these for each model. Methods that need data, alignment and `repair` use it;
    `calibrate` says how models are measured. Options that name files of statistics take `Statistics` too.

    `tokenizer` matches tokens by their text: "union", "base", a model whose tokenizer the result gets, or a mapping as
    in recipes. Without it models that give tokens other ids are refused; "rows" merges them row by row all the same.

    `level`, `scale` and `sweeps` are those of `isomerge.align`, and `align` may be a mapping with more of its options.
    `dtype` is what is written (by itself: as the inputs), `seed` names the random numbers of methods that draw some.

    >>> isomerge.merge(["model-a", "model-b"], method="ties", base="base", density=0.5).save("merged")  # doctest: +SKIP
    """
    if method not in ALL_METHODS:
        raise RequestError(f"Merging: '{method}' is not a merge method. {did_you_mean(method, ALL_METHODS)}")
    if isinstance(models, (str, Path, Mapping)):
        raise RequestError("Merging: models is one model, and a list of them is wanted, as in merge([a, b]).")
    models = list(models)
    if not models:
        raise RequestError("Merging: there is no model. Name at least one, and two to have something to merge.")
    if weights is not None and "weight" in options:
        raise RequestError("Merging: weights and weight are two words for the same. Leave one of them out.")
    if weights is not None:
        options = {"weight": list(weights), **options}
    options, statistics = named_statistics(options)
    named, given = _named(models)
    origin = _reference(base, "base") if base is not None else None
    if origin is not None:
        given.setdefault(origin, base)
    if not align and (level, scale, sweeps) != ("full", None, 15):
        raise RequestError("Merging: level, scale and sweeps are of the alignment. Add align=True, or leave them out.")
    shared = {"level": level, "scale": scale, "sweeps": sweeps}
    data_sets = DataSets()
    own = dict(align) if isinstance(align, Mapping) else {}
    if "data" in own:
        own["data"] = data_sets.named(own["data"])
    settings: bool | dict[str, Any] = {**shared, **own} if align else False
    recipe = recipe_of(
        named, method, base=origin, options=options, align=settings, data=data_sets.named(data), calibrate=calibrate,
        repair=repair, tokenizer=_tokenizer(tokenizer), dtype=dtype, seed=seed,
    )  # fmt: skip
    checkpoints = {reference: open_model(reference, model) for reference, model in given.items()}
    run = RunSettings(threads, device, max_memory, progress, data_sets, statistics)
    return _merge([recipe], checkpoints, run, same_ids=tokenizer != ROWS)


def merge_recipe(
    recipe: str | Path | dict[str, Any] | list[Recipe],
    *,
    models: Mapping[str, Any] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    max_memory: int | str | None = None,
    seed: int | None = None,
    same_ids: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Merge as a recipe says: a path, YAML text or a dict. `models` replaces references by state_dicts or modules.

    A recipe without `tokenizer` merges vocabulary tables row by row, with a note where models give tokens other ids;
    with `same_ids` that is an error.

    >>> isomerge.merge_recipe("recipe.yml").save("merged")                                              # doctest: +SKIP
    """
    documents = recipe if isinstance(recipe, list) else load_recipe(recipe)
    if not documents or not all(isinstance(document, Recipe) for document in documents):
        raise RequestError("Merging: a list of recipes holds what load_recipe gives. Pass a path, YAML text or a dict.")
    if seed is not None:  # into the recipe, which is what the lock file repeats
        documents = [document.model_copy(update={"seed": seed}) for document in documents]
    given = {ModelReference.parse(reference): model for reference, model in (models or {}).items()}
    checkpoints = open_models(documents, given)
    unknown = sorted(str(reference) for reference in set(given) - set(checkpoints))
    if unknown:
        hint = did_you_mean(unknown[0], [str(reference) for reference in checkpoints])
        raise RequestError(f"Merging: models has '{unknown[0]}', which the recipe does not name. {hint}")
    return _merge(documents, checkpoints, RunSettings(threads, device, max_memory, progress), same_ids=same_ids)


def planned(documents: Sequence[Recipe], *, same_ids: bool = False) -> Merged:
    """The merge as far as headers tell: everything is checked, nothing is aligned or computed."""
    return _merge(list(documents), open_models(documents), RunSettings(), solve=False, same_ids=same_ids)


def _merge(
    documents: list[Recipe],
    checkpoints: Mapping[ModelReference, Checkpoint],
    settings: RunSettings,
    *,
    solve: bool = True,
    same_ids: bool = False,
) -> Merged:
    start = time.perf_counter()
    known = dict(checkpoints)
    require_device(settings.device)
    for checkpoint in known.values():
        require_floating(checkpoint)
    notes = differences(list(known.values()), documents, ids=not same_ids)
    notes += left_out_adapters(list(known.values()))
    notes += [note for document in documents for note in base_among_models(document)]
    if same_ids:
        require_same_ids(documents[-1], list(known.values()))
    merged: Merged | None = None
    warnings: list[str] = []
    files: dict[str, Checkpoint] = {}
    for place, document in enumerate(documents):
        own = {reference: known[reference] for reference in document.referenced_models()}
        plan = plan_tensors(document, own)
        donor = own[plan.donor]
        made = prepare(document, donor, own, settings) if solve else foresee(document, own, settings)
        merged = combine(document, plan, own, made, settings, solved=solve)
        if solve and made.aligned is None and made.solved is None:
            warnings += name_strangers(plan, {r: checkpoint for r, checkpoint in own.items() if r in checkpoints})
        warnings += name_uneven(merged.jobs, plan) if solve else []
        files |= {name: merged.inputs[name] for name in merged.files}
        if place < len(documents) - 1:
            known[ModelReference.parse(str(document.name))] = as_checkpoint(merged, str(document.name))
    assert merged is not None
    merged.data = list(settings.data.opened.values())
    merged.recipes = list(documents)
    merged.inputs = {str(reference): checkpoint for reference, checkpoint in checkpoints.items()} | files
    merged.files = frozenset(files)
    merged.notes = notes + merged.notes + warnings
    merged.started = start
    return merged


def _tokenizer(given: str | os.PathLike[str] | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """As a recipe says it."""
    return None if given == ROWS else os.fspath(given) if isinstance(given, os.PathLike) else given


def _named(models: Sequence[Any]) -> tuple[list[ModelReference], dict[ModelReference, Any]]:
    """A reference for every model; one that is given as an object may be there twice."""
    named: list[ModelReference] = []
    for place, model in enumerate(models, start=1):
        reference = _reference(model, f"model {place}")
        if reference in named and not isinstance(model, (str, Path)):
            reference = ModelReference(f"model {place}")
        named.append(reference)
    return named, dict(zip(named, models, strict=True))


def _reference(model: Any, otherwise: str) -> ModelReference:
    """How a recipe calls a model that was given as an object."""
    if isinstance(model, ModelReference):
        return model
    if isinstance(model, (str, Path)):
        return ModelReference.parse(str(model))
    return ModelReference(getattr(model, "name", None) or otherwise)
