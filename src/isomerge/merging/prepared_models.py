"""What is known of the models before their tensors are merged: aligned, measured, or merged by a data method."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isomerge.alignment.api import align_family
from isomerge.calibration import Statistics
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.kept import KeptWork, work_key
from isomerge.checkpoint.lock import current_versions
from isomerge.engine import Engine, Threads
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.data_methods import DATA_METHODS, MergedWeights, MergeInputs
from isomerge.merging.layerwise.goals import in_one
from isomerge.merging.measured_statistics import MeasuredModels, measure
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.recipe.expert_rules import expert_requests
from isomerge.merging.recipe_data import DataSets, aligning_data, data_owners, data_uses, method_data, require_labels
from isomerge.merging.run.sources import InputHashes
from isomerge.running.stock import run_versions

Models = Mapping[ModelReference, Checkpoint]


@dataclass
class RunSettings:
    """How a merge is run, whatever the recipe says."""

    threads: int | None = None
    device: str = "cpu"
    max_memory: int | str | None = None
    progress: Progress | None = None
    data: DataSets = field(default_factory=DataSets)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Statistics that were given as objects, by the name that stands for them in the recipe."""
    hashes: InputHashes = field(default_factory=InputHashes)
    resume: str | os.PathLike[str] | None = None
    """The folder in which to keep what is solved on the way."""
    kept: KeptWork | None = None
    """The same, for one document."""
    engine: Engine = field(default_factory=Threads)


@dataclass
class PreparedModels:
    """What is known of the models by the time their tensors are merged."""

    aligned: AlignedTensors | None = None
    measured: MeasuredModels | None = None
    solved: MergedWeights | None = None
    """The result itself, where the method is one for whole models."""
    notes: list[str] = field(default_factory=list)
    align: Callable[[], AlignedTensors | None] | None = None
    """Aligns the models that `solved` was made of, unless that was done to make it."""

    @property
    def config_changes(self) -> dict[str, Any]:
        return self.solved.config_changes if self.solved else self.aligned.config_changes if self.aligned else {}

    @property
    def alignment(self) -> dict[str, Any] | None:
        return self.solved.alignment if self.solved else self.aligned.record if self.aligned else None


def kept_work(documents: Sequence[Recipe], checkpoints: Models, settings: RunSettings) -> KeptWork | None:
    """Where to keep what is solved; None where that is not asked for, or an input cannot be told from a changed one."""
    solves = [document.align is not None or document.merge_method in DATA_METHODS for document in documents]
    identities = {str(reference): checkpoint.identity() for reference, checkpoint in checkpoints.items()}
    if settings.resume is None or not any(solves) or None in identities.values():
        return None
    data = [use.open(settings.data).locked() for document in documents for use in data_uses(document)]
    key = work_key(
        work="merge", versions=run_versions() if data else current_versions(), models=identities, data=data,
        recipes=[document.to_yaml() for document in documents], device=settings.device,
        torch_threads=torch.get_num_threads(),
    )  # fmt: skip
    return KeptWork(settings.resume, key)


def check_data(recipe: Recipe, models: Models, settings: RunSettings) -> None:
    """Open all data, and raise where it does not fit what it is for; nothing is run."""
    if recipe.merge_method in DATA_METHODS:
        DATA_METHODS[recipe.merge_method].options_in(recipe)
    for use in data_uses(recipe):
        data = use.open(settings.data)
        if use.labels:
            require_labels(use, data, next(iter(models.values())))


def prepare(recipe: Recipe, donor: Checkpoint, models: Models, settings: RunSettings) -> PreparedModels:
    """Align the models and run them over data, as far as the recipe asks for it."""
    check_data(recipe, models, settings)
    if recipe.merge_method in DATA_METHODS:
        method = DATA_METHODS[recipe.merge_method]
        align = functools.cache(lambda: _aligned(recipe, donor, models, settings))
        ordered = [models[entry.model] for entry in recipe.models or ()]
        uses = method_data(recipe)
        data = [use.open(settings.data) for use in uses]
        owners = [data_owners(recipe, use.settings) for use in uses]
        aligned_once = align if recipe.align is not None else None
        base = None if method.base == "ignored" or recipe.base_model is None else models[recipe.base_model]
        inputs = MergeInputs(
            ordered, data, aligned_once, settings.device, settings.progress, owners=owners, base=base,
            kept=settings.kept, seed=recipe.seed, experts=expert_requests(recipe, recipe.experts),
            shared_expert=next(iter(expert_requests(recipe, recipe.shared_experts)), None),
        )  # fmt: skip
        solved = method(inputs, method.options_in(recipe))
        return PreparedModels(solved=solved, notes=[*solved.notes, *settings.data.notes], align=align)
    aligned = _aligned(recipe, donor, models, settings)
    measured = measure(
        recipe, models, settings.data, aligned=aligned, device=settings.device, progress=settings.progress
    )
    return PreparedModels(aligned, measured, notes=[*(aligned.notes if aligned else ()), *settings.data.notes])


def models_to_align(recipe: Recipe, donor: Checkpoint, models: Models) -> tuple[Checkpoint, list[Checkpoint]]:
    """The anchor and the others; none where an alignment is not asked for."""
    if recipe.align is None:
        return donor, []
    anchor = models[recipe.align.anchor] if recipe.align.anchor else donor
    return anchor, [model for model in models.values() if model is not anchor]


def _aligned(recipe: Recipe, donor: Checkpoint, models: Models, settings: RunSettings) -> AlignedTensors | None:
    """Every model next to the anchor; None where that is not asked for, or there is nothing but the anchor."""
    anchor, others = models_to_align(recipe, donor, models)
    if recipe.align is None or not others:
        return None
    to_mean = recipe.align.many != "anchor"  # then the anchor moves like the others
    if to_mean:
        others.insert(1, anchor)
    labels = recipe.align.learn_towards == "labels"
    passes = [settings.data.open(one).passes(anchor, labels=labels) for one in aligning_data(recipe)]
    family = align_family(
        others, anchor=None if to_mean else anchor, **recipe.align.options(),
        data=in_one(passes) if passes else None,
        threads=settings.threads, engine=settings.engine, max_memory=settings.max_memory, device=settings.device,
        progress=settings.progress,
        resume=settings.kept, seed=recipe.seed,
    )  # fmt: skip
    return AlignedTensors(family, anchor)
