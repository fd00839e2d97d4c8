"""Who uses which data in a recipe, and how often models run over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.evaluation.choosing import require_fitting, task_name
from isomerge.merging.data_sets import DataSet, DataSets
from isomerge.merging.measured import counting, measures_of, measuring_data
from isomerge.merging.recipe import Recipe
from isomerge.merging.recipe.settings import DataSettings
from isomerge.merging.whole import WHOLE

MEASURING = {"fisher": "each model once, with gradients", "gram": "each model once"}


@dataclass(frozen=True)
class DataUse:
    """One purpose with its data."""

    purpose: str
    settings: DataSettings
    passes: str
    """In words: how many there are depends on what the models turn out to be."""
    prefer: str = "train"
    labels: bool = False

    def open(self, data: DataSets) -> DataSet:
        return data.open(self.settings, prefer=self.prefer)


def data_uses(recipe: Recipe) -> Iterator[DataUse]:
    """In the order they come."""
    if seen := aligning_data(recipe):
        yield DataUse("align", seen, "source and anchor together, once or twice for each model that moves")
    if recipe.merge_method in WHOLE:
        yield from method_data(recipe)
    elif what := measures_of(recipe):
        for model in counting(recipe):
            if settings := measuring_data(recipe, model):
                labels = recipe.calibrate is not None and recipe.calibrate.fisher == "empirical"
                yield DataUse(recipe.merge_method, settings, MEASURING[what], labels=labels)
    if recipe.repair is not None and recipe.data is not None:
        yield DataUse("repair", recipe.data, "each model once, then the merged one once per repaired layer")


def aligning_data(recipe: Recipe) -> DataSettings | None:
    """What alignment sees activations on, if it looks at any."""
    if recipe.align is None or recipe.align.evidence == "weights":
        return None
    return recipe.align.data or recipe.data


def method_data(recipe: Recipe) -> list[DataUse]:
    """The data of a whole-model method: the recipe's, or those of its models."""
    method = WHOLE[recipe.merge_method]
    wanted = [recipe.data_of(entry.model) for entry in recipe.models or ()]
    if method.data != "each":
        wanted = list(dict.fromkeys(wanted))
    prefer = "validation" if method.labels else "train"
    return [
        DataUse(method.name, settings, method.passes, prefer, method.labels)
        for settings in wanted
        if settings is not None
    ]


def require_labels(use: DataUse, data: DataSet, first: Checkpoint) -> None:
    """Raise, before anything is run, where the data has no labels for what this model is for."""
    require_fitting(data.data, task_name(first.config, None, first.name), first.name)
    batch = next(iter(data.data.batches(first, batch_size=1, limit=1, labels=True)))
    if "labels" not in batch:
        raise RequestError(
            f"Merging with {use.purpose} on {data.data.name}: it has no labels. Name their column with 'label' "
            "(--label), or use labelled data."
        )
