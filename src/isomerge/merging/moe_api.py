"""`isomerge.moe`: dense models in, a mixture of experts out; or a mixture in, a smaller or a dense one out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.checkpoint.dtypes import dtype_name
from isomerge.choices import GATE_MODES, TO_DENSE
from isomerge.errors import RequestError
from isomerge.merging.api import RecipeSource, merge, named_models
from isomerge.merging.merge_documents import merge_documents
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.plan.models import open_models
from isomerge.merging.prepared_models import RunSettings
from isomerge.merging.recipe import Recipe, load_recipe
from isomerge.merging.recipe.document import as_data
from isomerge.merging.recipe.expert_rules import METHOD
from isomerge.merging.recipe_data import DataSets
from isomerge.progress_bars import Shown, callback, shows_progress

ACT = "Building a mixture of experts"


@shows_progress
def moe(
    source: RecipeSource | Any,
    *,
    base: Any = None,
    copies: int | None = None,
    keep: int | None = None,
    to_dense: str | None = None,
    gate_mode: str | None = None,
    experts_per_token: int | None = None,
    architecture: str | None = None,
    data: Any = None,
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    device: str = "cpu",
    seed: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
) -> Merged:
    """Build a mixture of experts from dense models, make one smaller, or make one dense.

    `source` is a recipe (as for mergekit-moe: a path, YAML text or a dict), or a list of models, each of which becomes
    an expert in everything else that `base` has (the first model, if none is named). With `copies`, it is one dense
    model, whose feed-forward becomes so many experts, with the same function. With `keep`, it is a mixture, of which
    so many experts stay in every layer; with `to_dense`, one whose experts become one feed-forward: their mean
    ("average"), the one used most ("most_used"), or their mean by use ("by_use").

    `gate_mode`, `experts_per_token` and `architecture` are keys of the recipe. `data` is one data set, or a list with
    one for each model: with it the result is measured (routing shares and losses), routers of gate_mode "data" are
    fitted, and experts are compared by outputs and not by weights.

    >>> upcycled = isomerge.moe("model-a", copies=4)
    >>> upcycled.config["num_local_experts"]
    4
    """
    progress = callback(progress)
    require_types(
        copies=(copies, int, None), keep=(keep, int, None), to_dense=(to_dense, str, None),
        gate_mode=(gate_mode, str, None), experts_per_token=(experts_per_token, int, None),
        architecture=(architecture, str, None), dtype=(dtype, str, torch.dtype, None), threads=(threads, int, None),
        seed=(seed, int, None), resume=(resume, str, os.PathLike, None),
    )  # fmt: skip
    require_shared_types(device=device, progress=progress)
    _require_one(copies=copies, keep=keep, to_dense=to_dense)
    shared: dict[str, Any] = {"data": data, "dtype": dtype, "threads": threads, "device": device, "resume": resume,
                              "progress": progress}  # fmt: skip
    if keep is not None or to_dense is not None:
        _require_unused("a mixture is made smaller", base=base, gate_mode=gate_mode, architecture=architecture)
        shared["seed"] = seed or 0
        if to_dense is not None:
            _require_unused("a dense model has no experts to choose", experts_per_token=experts_per_token)
            require_choice("to_dense", to_dense, TO_DENSE)
            return merge([source], method="moe_dense", experts=to_dense, **shared)
        return merge([source], method="moe_shrink", keep=keep, experts_per_token=experts_per_token, **shared)
    if gate_mode is not None:
        require_choice("gate_mode", gate_mode, GATE_MODES)
    asked = {"gate_mode": gate_mode, "experts_per_token": experts_per_token, "architecture": architecture}
    options: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    if copies is None and isinstance(source, (str, os.PathLike, Mapping)):
        return _of_recipe(source, base, options, data, dtype, seed, RunSettings(
            threads, device, None, progress, DataSets(), resume=resume,
        ))  # fmt: skip
    models = [source] if copies is not None else source
    if not isinstance(models, Sequence):
        raise RequestError(f"{ACT}: source must be a recipe, or a list of models, as in moe([a, b]).", keys=("source",))
    experts = copies if copies is not None else len(models)
    options = {"gate_mode": "random", "experts_per_token": min(2, max(1, experts)), **options}
    if copies is None:
        return merge(models, method=METHOD, base=base, seed=seed or 0, **options, **shared)
    if copies < 1:
        raise RequestError(f"{ACT}: copies is {copies}. Give the number of experts, 2 or more.", keys=("copies",))
    named, origin, checkpoints = named_models(models, base)
    data_sets = DataSets()
    content = {
        "merge_method": METHOD, "base_model": origin, "parameters": options, "seed": seed or 0,
        "experts": [{"source_model": named[0]}] * copies, "data": data_sets.named(data), "dtype": dtype_name(dtype),
    }  # fmt: skip
    (recipe,) = load_recipe({key: value for key, value in content.items() if value is not None})
    return merge_documents(
        [recipe], checkpoints, RunSettings(threads, device, None, progress, data_sets, resume=resume), same_ids=False
    )


def _of_recipe(
    source: Any, base: Any, options: dict[str, Any], data: Any, dtype: Any, seed: int | None, run: RunSettings
) -> Merged:
    """As a recipe says, with what was asked for beside it."""
    _require_unused("the recipe names its base_model", base=base)
    *earlier, recipe = load_recipe(source)
    if recipe.merge_method != METHOD:
        raise RequestError(
            f"{ACT}: the recipe has merge_method: {recipe.merge_method}, and no 'experts'. Name them there, or run "
            "isomerge merge.",
            keys=("source",),
        )
    documents = [*earlier, _completed(recipe, options, run.data.named(data), dtype_name(dtype), seed)]
    return merge_documents(documents, open_models(documents), run, same_ids=False)


def _completed(recipe: Recipe, options: dict[str, Any], data: Any, dtype: str | None, seed: int | None) -> Recipe:
    content = as_data(recipe)
    content["parameters"] = {**(content.get("parameters") or {}), **options}
    if isinstance(data, list):
        models = content["models"]
        if len(data) != len(models):
            raise RequestError(
                f"{ACT}: there are {len(data)} data sets for {len(models)} models. Give one for all, or one for each "
                f"in this order: {', '.join(model['model'] for model in models)}.",
                keys=("data",),
            )
        content["models"] = [{**model, "data": own} for model, own in zip(models, data, strict=True)]
    elif data is not None:
        content["data"] = data
    content |= {key: value for key, value in {"dtype": dtype, "seed": seed}.items() if value is not None}
    (completed,) = load_recipe(content)
    return completed


def _require_one(**kinds: Any) -> None:
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"{ACT}: {' and '.join(given)} are given. Choose one of them.", keys=tuple(given))


def _require_unused(why: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise RequestError(f"{ACT}: {', '.join(given)} has no effect, since {why}. Leave it out.", keys=tuple(given))
