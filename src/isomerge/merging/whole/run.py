"""Run a whole-model method as a recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.merging.whole.method import WHOLE, Solved, WholeMethod, Work

if TYPE_CHECKING:
    from isomerge.merging.recipe import ModelReference, Recipe
    from isomerge.merging.steps import RunSettings


def run_whole(
    recipe: Recipe,
    models: Mapping[ModelReference, Checkpoint],
    settings: RunSettings,
    align: Mapping[str, Any] | None,
) -> Solved:
    """The models in the recipe's order, its data and its options, to the method."""
    from isomerge.merging.data_uses import method_data

    method = WHOLE[recipe.merge_method]
    ordered = [models[entry.model] for entry in recipe.models or ()]
    data = [use.open(settings.data) for use in method_data(recipe)]
    return method(Work(ordered, data, align, settings.device, settings.progress), options_of(recipe, method))


def options_of(recipe: Recipe, method: WholeMethod) -> dict[str, Any]:
    """One value per option, or a list of one per model; nothing in a whole model varies with the layer."""
    shared = recipe.parameters or {}
    found: dict[str, Any] = {}
    for option in method.options:
        value = shared.get(option.name, option.default)
        each = [(entry.parameters or {}).get(option.name, value) for entry in recipe.models or ()]
        found[option.name] = each if option.per_model else value
    return found


def check_weights(recipe: Recipe) -> None:
    """Weights that mean something, before anything is run."""
    method = WHOLE[recipe.merge_method]
    weights = options_of(recipe, method).get("weight")
    if weights is not None and not sum(weights) > 0:
        raise RequestError(f"Merging with {method.name}: the weights {weights} need a positive sum.")
