"""Ways of merging that are worth a try, from what `check` says of the models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.checking.api import INCOMPATIBLE, CheckResult
from isomerge.errors import RequestError
from isomerge.kinship import IDENTICAL, STRANGERS
from isomerge.merging.recipe import Recipe, load_recipe, recipe_of
from isomerge.merging.recipe.document import as_data
from isomerge.sweeping.sweep_plan import SweepPlan, plan_sweep

KEPT = ("tokenizer", "chat_template", "dtype")
"""Keys of the suggested recipe that hold for every way of merging."""
DENSITY = 0.5


@dataclass(frozen=True)
class WayToMerge:
    """One way of merging, as a recipe with numbers to search."""

    name: str
    plan: SweepPlan


def ways_to_merge(
    models: Sequence[str], base: str | None, found: CheckResult, data: Mapping[str, Any] | None, *, evaluations: int
) -> tuple[list[WayToMerge], list[str]]:
    """What to try, first what helps most often, and notes on what is left out. `data` is for methods that need some."""
    if found.verdict in (INCOMPATIBLE, IDENTICAL) or found.recipe is None:
        raise RequestError(f"Looking for the best merge: {found.summary} See isomerge check.")
    if base is not None and found.base is None:
        raise RequestError(
            f"Looking for the best merge: {base} has another architecture or other shapes than {models[0]}, so "
            "it cannot be their base. Leave base out, or name the model that they come from.",
            keys=("base",),
        )
    suggested = load_recipe(found.recipe)[0]
    shared = {key: value for key, value in as_data(suggested).items() if key in KEPT}
    named = [model for model in models if model != base]
    ways: list[WayToMerge] = []
    notes: list[str] = []
    for name, recipe in [
        *_written(named, base, found.verdict == STRANGERS, shared, data, notes), ("as check suggests", suggested)
    ]:  # fmt: skip
        if recipe is not None and _kind(recipe) not in [_kind(way.plan.recipe) for way in ways]:
            ways.append(WayToMerge(name, _plan(recipe, evaluations)))
    return ways, notes


def _kind(recipe: Recipe) -> tuple[str, bool]:
    """Recipes of one kind differ in numbers only, which are searched."""
    return recipe.merge_method, recipe.align is not None


def _written(
    models: Sequence[str],
    base: str | None,
    strangers: bool,
    shared: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    notes: list[str],
) -> Iterator[tuple[str, Recipe | None]]:
    def way(name: str, method: str, **given: Any) -> tuple[str, Recipe | None]:
        try:
            return name, recipe_of(given.pop("models", models), method, **shared, **given)
        except RequestError as error:
            notes.append(f"{name} was left out: {error}")
            return name, None

    if base is not None and not strangers:
        weight = round(1 / math.sqrt(len(models)), 2)
        yield way("task arithmetic", "task_arithmetic", base=base, options={"weight": weight})
        yield way("TIES", "ties", base=base, options={"density": DENSITY})
    yield way("mean", "linear")
    if strangers:
        yield way("aligned mean", "linear", align=True)
        if data is None:
            notes.append(
                "reconstruct was left out: it needs a part named train beside the data of the search and the test"
            )
        else:
            yield way("reconstruct", "reconstruct", data=dict(data), options={"features": "joint"})
    elif len(models) == 2:
        yield way("slerp", "slerp", models=models[1:], base=models[0], options={"t": 0.5})


def _plan(recipe: Recipe, evaluations: int) -> SweepPlan:
    """With the numbers that have a natural range; a recipe without such numbers is measured as it is."""
    try:
        return plan_sweep(recipe, None, mode="grid", search=evaluations, force=False)
    except RequestError as error:
        if "over" not in error.keys:
            raise
        return SweepPlan(recipe, [], [], "search", 1, "")
