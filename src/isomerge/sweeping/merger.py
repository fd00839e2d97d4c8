"""One merge after the other: what does not change between two points is done once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.merging.api import planned
from isomerge.merging.data_methods import DATA_METHODS
from isomerge.merging.merge_documents import merge_document
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.plan.models import open_model
from isomerge.merging.plan.tensors import plan_tensors
from isomerge.merging.prepared_models import PreparedModels, RunSettings, prepare
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe.document import as_data
from isomerge.merging.recipe.entries import parameter_blocks
from isomerge.merging.recipe_data import data_uses, measures_of
from isomerge.merging.vocabulary.from_recipe import require_same_ids

AFTERWARDS = ("name", "dtype", "out_dtype", "tokenizer", "chat_template", "repair", "layer_scale")
"""Keys of a recipe that neither alignment nor the runs over data look at."""


@dataclass
class Merger:
    """Merges recipes that differ in a few values. Models stay open; the last alignment and statistics stay known."""

    settings: RunSettings
    opened: dict[str, Checkpoint] = field(default_factory=dict)
    """By reference."""
    same_ids: bool = False
    """Whether models that give tokens other ids are refused, as by `merge_recipe`."""
    given: Mapping[ModelReference, Checkpoint] = field(default_factory=dict)
    """Models that were passed as objects, under the names that recipes have for them."""
    _outline: tuple[str, Merged] | None = None
    _prepared: tuple[str, PreparedModels] | None = None

    def __post_init__(self) -> None:
        self.settings.hashes.wanted = False  # nothing is written, so there is no lock to hold them
        self.opened |= {str(reference): checkpoint for reference, checkpoint in self.given.items()}

    def open(self, recipes: Iterable[Recipe]) -> None:
        """Every model that any of the recipes names, by its header."""
        for reference in dict.fromkeys(model for recipe in recipes for model in recipe.referenced_models()):
            if str(reference) not in self.opened:
                self.opened[str(reference)] = open_model(reference)

    def require(self, recipe: Recipe) -> None:
        """Refuse what headers show that cannot be merged, before anything is."""
        plan_tensors(recipe, self._models(recipe))
        if self.same_ids:
            require_same_ids(recipe, list(self._models(recipe).values()))

    def data_of(self, recipes: Iterable[Recipe]) -> list[dict[str, Any]]:
        """What models are run on while they are merged, for all of the recipes."""
        for use in (use for recipe in recipes for use in data_uses(recipe)):
            use.open(self.settings.data)
        return [one.record() for one in self.settings.data.opened.values()]

    def merged(self, recipe: Recipe) -> Merged:
        """The model of a recipe, computed when it is read."""
        outline = self.outline(recipe)
        models = self._models(recipe)
        plan = plan_tensors(recipe, models)
        made = self._made(recipe, models[plan.donor], models)
        return merge_document(recipe, plan, models, made, self.settings, outline=outline)

    def outline(self, recipe: Recipe) -> Merged:
        """What headers tell of the result: its tokens and its config.json. The method changes neither."""
        data = _without_options(recipe)
        key = json.dumps({key: data[key] for key in data if key not in ("merge_method", "seed")}, sort_keys=True)
        if self._outline is None or self._outline[0] != key:
            models = {str(r): self.given[r] for r in recipe.referenced_models() if r in self.given}
            self._outline = key, planned([recipe], models=models, same_ids=self.same_ids)
            for name, checkpoint in self._outline[1].inputs.items():
                self.opened.setdefault(name, checkpoint)
        return self._outline[1]

    def _models(self, recipe: Recipe) -> dict[ModelReference, Checkpoint]:
        return {reference: self.opened[str(reference)] for reference in recipe.referenced_models()}

    def _made(self, recipe: Recipe, donor: Checkpoint, models: Mapping[ModelReference, Checkpoint]) -> PreparedModels:
        key = preparation(recipe)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = None  # let go of the last before the next is made
            self._prepared = key, prepare(recipe, donor, models, self.settings)
        return self._prepared[1]


def preparation(recipe: Recipe) -> str:
    """Names what is found out before tensors are merged: the same for recipes that share alignment and statistics."""
    if recipe.merge_method in DATA_METHODS:
        return json.dumps(as_data(recipe), sort_keys=True)
    data = _without_options(recipe)
    for key in (*AFTERWARDS, "merge_method"):
        data.pop(key, None)
    measured = measures_of(recipe)
    if measured is None:
        data.pop("seed", None)
    return json.dumps({**data, "measured": [measured, recipe.merge_method] if measured else None}, sort_keys=True)


def _without_options(recipe: Recipe) -> dict[str, Any]:
    data = copy.deepcopy(as_data(recipe))
    for _, block, _ in parameter_blocks(data):
        block.clear()
    for entry in [data, *data.get("models", ())]:
        if not entry.get("parameters", True):
            del entry["parameters"]
    return data
