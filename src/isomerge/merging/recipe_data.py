"""The data of a recipe: who uses which, how often models run over it, and the data sets themselves, opened once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint
from isomerge.data import Data, open_data
from isomerge.data.base import Batch, Batches, Wanted
from isomerge.data.parallel import ParallelTexts, PendingTexts
from isomerge.errors import RequestError
from isomerge.evaluation.task_choice import require_fitting, task_name
from isomerge.merging.data_methods import DATA_METHODS
from isomerge.merging.methods import METHODS
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe.data_rules import names_files
from isomerge.merging.recipe.settings import DataSettings

BASE_IMPORTANCE = "base_importance"
MEASURING = {"fisher": "each model once, with gradients", "gram": "each model once"}


class DescribedData(Data):
    """What records and locks say of data that is not at hand."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.name, self.kind, self.size, self.classes, self.limit = (
            data.name, data.kind, data.size, data.classes, data.limit
        )  # fmt: skip
        self.notes += data.notes
        self._sha256 = data.sha256

    @property
    def sha256(self) -> str:
        return self._sha256

    def read(self, checkpoint: Checkpoint, wanted: Wanted) -> Iterator[Batch]:
        raise RequestError(f"Reading {self.name}: a copied or pickled result describes its data only. Open it again.")


@dataclass
class DataSet:
    """Opened data with what the recipe says about its use."""

    settings: DataSettings
    data: Data
    how: dict[str, Any]
    """The arguments it was opened with; with the path, all it takes to open it again."""
    in_memory: bool = False
    _passes: dict[tuple[int, bool, str], Batches] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """In a pickle or a copy, data is described and not held: it may be anything, and was used already."""
        return {**self.__dict__, "data": DescribedData(self.data), "_passes": {}}

    def beside(self, others: Mapping[int, Checkpoint], pending: PendingTexts) -> DataSet:
        """The same texts for models of other vocabularies, too."""
        return replace(self, data=ParallelTexts(self.data, others, pending), _passes={})

    def passes(self, checkpoint: Checkpoint, *, labels: bool = False, device: str = "cpu") -> Batches:
        """Batches for this model, a fresh iterator at every call; what fits in memory is prepared once for all."""
        key = (id(checkpoint), labels, device)
        if key not in self._passes:
            self._passes[key] = self.data.passes(
                checkpoint, batch_size=self.settings.batch_size, limit=self.settings.limit, labels=labels,
                seed=self.settings.seed, device=device,
            )  # fmt: skip
        return self._passes[key]

    @property
    def examples(self) -> int:
        """How many are used."""
        return self.data.used(self.settings.limit)

    def record(self) -> dict[str, Any]:
        """What cards, reports and locks say of it: no place on this machine."""
        about = {"name": self.data.name, "kind": self.data.kind, "sha256": self.data.sha256}
        return {**about, "size": self.data.size, "examples": self.examples}

    def locked(self) -> dict[str, Any]:
        """… and how to open it again; data that was given as an object has no path."""
        return {**self.record(), "path": None if self.in_memory else self.settings.path, "open": self.how}


@dataclass
class DataSets:
    """Opens each data set once."""

    given: dict[str, Any] = field(default_factory=dict)
    """Data that was given as an object, by the path that stands for it in the recipe."""
    opened: dict[tuple[Any, ...], DataSet] = field(default_factory=dict)

    def named(self, data: Any) -> Any:
        """Data as a recipe can write it; objects are kept aside under a name."""
        if isinstance(data, (list, tuple)) and not _are_batches(data):
            return [self.named(one) for one in data]
        if data is None or isinstance(data, str):
            return data
        if isinstance(data, Mapping):
            return {**data, "path": self.named(data["path"])} if "path" in data else data
        if isinstance(data, os.PathLike):
            return os.fspath(data)
        opened = open_data(data)
        name = opened.name
        while self.given.get(name, opened) is not opened:
            name += "'"
        self.given[name] = opened
        return name

    def open(self, settings: DataSettings, *, prefer: str = "train") -> DataSet:
        """`prefer` is the part to use where there are several and none is named."""
        key = (settings, prefer)
        if key not in self.opened:
            how = {**settings.opening(), "prefer": prefer}
            same = next(
                (one.data for one in self.opened.values() if (one.settings.path, one.how) == (settings.path, how)), None
            )
            given = self.given.get(settings.path)
            data = same or open_data(settings.path if given is None else given, **how)
            self.opened[key] = DataSet(settings, data, how, given is not None)
        return self.opened[key]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for one in self.opened.values() for note in one.data.notes))


def _are_batches(data: Sequence[Any]) -> bool:
    """Tensors by name in every entry: one data set, and not one for each model."""
    return bool(data) and all(
        isinstance(one, Mapping) and bool(one) and all(isinstance(value, Tensor) for value in one.values())
        for one in data
    )


# --- who uses which data ----------------------------------------------------------------------------------------------
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
    for aligning in aligning_data(recipe):
        labels = recipe.align is not None and recipe.align.learn_towards == "labels"
        often = "source and anchor together, once or twice for each model that moves"
        yield DataUse("align", aligning, often, labels=labels)
    if recipe.merge_method in DATA_METHODS:
        yield from method_data(recipe)
    elif what := measures_of(recipe):
        for model in measured_models(recipe):
            if settings := measuring_data(recipe, model):
                labels = recipe.calibrate is not None and recipe.calibrate.fisher == "empirical"
                yield DataUse(recipe.merge_method, settings, MEASURING[what], labels=labels)
    for repairing in repairing_data(recipe):
        yield DataUse("repair", repairing, "each model once, then the merged one once per repaired layer")


def aligning_data(recipe: Recipe) -> list[DataSettings]:
    """What alignment sees activations on or learns from, if it does either: the data of all models, where each has its
    own and evidence from data was asked for."""
    align = recipe.align
    if align is None or (align.evidence == "weights" and not align.learn):
        return []
    if shared := align.data or recipe.data:
        return [shared]
    return own_data(recipe) if align.evidence is not None or align.learn else []


def repairing_data(recipe: Recipe) -> list[DataSettings]:
    """What units are measured on: each model's own data, or the recipe's."""
    if recipe.repair is None:
        return []
    own = own_data(recipe) if recipe.repair.goals != "mean" or recipe.data is None else []
    return own or ([recipe.data] if recipe.data is not None else [])


def own_data(recipe: Recipe) -> list[DataSettings]:
    """The data sets of the models, where every model names one."""
    own = [entry.data for entry in recipe.models or ()]
    return list(dict.fromkeys(one for one in own if one is not None)) if all(one is not None for one in own) else []


def method_data(recipe: Recipe) -> list[DataUse]:
    """The data of a whole-model method: the recipe's, or those of its models."""
    method = DATA_METHODS[recipe.merge_method]
    wanted = [recipe.data_of(entry.model) for entry in recipe.models or ()]
    if method.data == "task":
        wanted.append(recipe.data)
    elif method.data != "each":
        wanted = list(dict.fromkeys(wanted))
    prefer = "validation" if method.labels else "train"
    return [
        DataUse(method.name, settings, method.passes, prefer, method.labels)
        for settings in wanted
        if settings is not None
    ]


def data_owners(recipe: Recipe, settings: DataSettings) -> list[int]:
    """The places of the models whose data this is."""
    return [k for k, entry in enumerate(recipe.models or ()) if recipe.data_of(entry.model) == settings]


def require_labels(use: DataUse, data: DataSet, first: Checkpoint) -> None:
    """Raise, before anything is run, where the data has no labels for what this model is for."""
    require_fitting(data.data, task_name(first.config, None, first.name), first.name)
    batch = next(iter(data.data.batches(first, batch_size=1, limit=1, labels=True)))
    if "labels" not in batch:
        raise RequestError(
            f"Merging with {use.purpose} on {data.data.name}: it has no labels. Name their column with 'label', "
            "or use labelled data.",
            keys=("label",),
        )


# --- what is measured of each model -----------------------------------------------------------------------------------
def measures_of(recipe: Recipe) -> str | None:
    """What has to be measured on data: nothing where files are named, or where the method asks for nothing."""
    method = METHODS.get(recipe.merge_method)
    wanted = method.measures if method is not None else None
    has_data = recipe.data is not None or any(entry.data is not None for entry in recipe.entries())
    return wanted if has_data and not names_files(recipe) else None


def measuring_data(recipe: Recipe, model: ModelReference) -> DataSettings | None:
    """What a model is measured on; `calibrate` may want fewer examples, or more."""
    settings = recipe.data_of(model)
    limit = recipe.calibrate.limit if recipe.calibrate else None
    return settings.model_copy(update={"limit": limit}) if settings is not None and limit is not None else settings


def measured_models(recipe: Recipe) -> list[ModelReference]:
    """The models to measure. A base counts only for a method that cannot do without it and weighs it too."""
    method = METHODS[recipe.merge_method]
    base_counts = method.base == "required" and any(option.name == BASE_IMPORTANCE for option in method.options)
    without = method.base != "ignored" and not base_counts
    return [model for model in recipe.referenced_models() if not (without and model == recipe.base_model)]
