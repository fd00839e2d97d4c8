"""Recipes that build a mixture of experts: mergekit-moe's form of them, and what can be wrong with the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isomerge.choices import PROMPTED_GATES
from isomerge.merging.merge_inputs import ExpertRequest
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.merging.recipe.problem_list import Path, Places, Problems

if TYPE_CHECKING:
    from isomerge.merging.recipe.definitions import ExpertEntry, Recipe

METHOD = "moe"
KEYS = ("experts", "shared_experts")
OPTIONS = ("gate_mode", "experts_per_token", "architecture")
"""Options that mergekit-moe has beside the experts, and not under `parameters`."""


def move_experts(data: dict[str, Any], places: Places, problems: Problems) -> None:
    """mergekit-moe's recipe as one of ours, in place: `merge_method: moe`, its options under `parameters`, and `models`
    are those that the experts come from."""
    given = [key for key in KEYS if data.get(key) is not None]
    if not given:
        return
    if data.setdefault("merge_method", METHOD) != METHOD:
        text = f"'{given[0]}' is for {METHOD}, and merge_method is {data['merge_method']}; leave one of them out"
        problems.add(places, (given[0],), text)
        return
    for key in OPTIONS:
        if key in data:
            _move_option(data, key, places, problems)
    if data.get("models") is None:
        entries = [one for key in given for one in (data[key] if isinstance(data[key], list) else ())]
        sources = {ModelReference.read(one.get("source_model")): one for one in entries if isinstance(one, Mapping)}
        data["models"] = [{"model": one["source_model"]} for known, one in sources.items() if known is not None] or None


def _move_option(data: dict[str, Any], key: str, places: Places, problems: Problems) -> None:
    value, shared = data.pop(key), data.get("parameters") or {}
    if not isinstance(shared, dict):
        return  # what is wrong with it is said elsewhere
    if key in shared:
        problems.add(places, (key,), f"'{key}' is given here and under 'parameters'; keep one of them")
    data["parameters"] = {**shared, key: value}
    if (line := places.line((key,))) is not None:
        places.lines[("parameters", key)] = line


def check_experts(recipe: Recipe, problems: Problems) -> None:
    """Enter what does not fit the gate or the models."""
    if recipe.merge_method != METHOD:
        return
    shared = recipe.parameters or {}
    experts = recipe.experts or ()
    count = len(experts) or len(recipe.models or ())
    chosen = shared.get("experts_per_token", 2)
    if isinstance(chosen, int) and not 1 <= chosen <= count:
        text = (
            f"'experts_per_token' is {chosen}, and there are {count} experts; a token is sent to 1 to {count} of them"
        )
        problems.add(recipe.places, ("parameters", "experts_per_token"), text)
    known = [entry.model for entry in recipe.models or ()]
    for key in KEYS:
        for place, one in enumerate(getattr(recipe, key) or ()):
            if one.source_model not in known:
                text = f"{one.source_model} is not one of the 'models'; add it there, or leave 'models' out"
                problems.add(recipe.places, (key, place, "source_model"), text)
    if shared.get("gate_mode", "hidden") in PROMPTED_GATES:
        _check_prompts(recipe, problems)


def _check_prompts(recipe: Recipe, problems: Problems) -> None:
    experts = recipe.experts or ()
    lacking: list[Path] = [("experts", k) for k, one in enumerate(experts) if not one.positive_prompts]
    lacking += [("shared_experts", k) for k, one in enumerate(recipe.shared_experts or ()) if not one.positive_prompts]
    gate = "gate_mode hidden or cheap_embed makes its row of what prompts say"
    for path in lacking if experts else [("merge_method",)]:
        what = (
            "this expert needs 'positive_prompts'" if experts else "the recipe needs 'experts' with 'positive_prompts'"
        )
        problems.add(recipe.places, path, f"{gate}: {what}, or choose gate_mode data or random")
    prompts = [(one.positive_prompts, one.negative_prompts) for one in experts]
    if len(prompts) > 1 and not lacking and all(one == prompts[0] for one in prompts):
        text = "all experts have the same prompts, so the router could not tell them apart; give each its own"
        problems.add(recipe.places, ("experts",), text)


def expert_requests(recipe: Recipe, entries: Sequence[ExpertEntry] | None) -> list[ExpertRequest]:
    """The same with the places of the models."""
    places = {entry.model: place for place, entry in enumerate(recipe.models or ())}
    return [
        ExpertRequest(
            places[one.source_model], one.positive_prompts or (), one.negative_prompts or (), one.noise_scale or 0.0,
            1.0 if one.residual_scale is None else one.residual_scale,
        )
        for one in entries or ()
    ]  # fmt: skip
