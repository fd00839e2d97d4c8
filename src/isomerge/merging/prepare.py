"""What comes before and after tensors are merged: alignment, runs of the models over data, repair."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isomerge.checkpoint import Checkpoint, TensorInfo, parse_dtype
from isomerge.merging.data_methods import DATA_METHODS, MergedWeights, MergeInputs
from isomerge.merging.pipeline import Job
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.settings import RunSettings

if TYPE_CHECKING:
    from isomerge.merging.aligned import AlignedModels
    from isomerge.merging.measured import MeasuredModels

Models = Mapping[ModelReference, Checkpoint]


@dataclass
class Prepared:
    """What is known of the models by the time their tensors are merged."""

    aligned: AlignedModels | None = None
    measured: MeasuredModels | None = None
    solved: MergedWeights | None = None
    """The result itself, where the method is one for whole models."""
    notes: list[str] = field(default_factory=list)
    align: Callable[[], AlignedModels | None] | None = None
    """Aligns the models that `solved` was made of, unless that was done to make it."""

    @property
    def config_changes(self) -> dict[str, Any]:
        return self.solved.config_changes if self.solved else self.aligned.config_changes if self.aligned else {}

    @property
    def alignment(self) -> dict[str, Any] | None:
        return self.solved.alignment if self.solved else self.aligned.record if self.aligned else None


def prepare(recipe: Recipe, donor: Checkpoint, models: Models, settings: RunSettings) -> Prepared:
    """Align the models and run them over data, as far as the recipe asks for it."""
    foresee(recipe, models, settings)
    if recipe.merge_method in DATA_METHODS:
        from isomerge.merging.recipe_data import method_data

        method = DATA_METHODS[recipe.merge_method]
        align = functools.cache(lambda: _aligned(recipe, donor, models, settings))
        ordered = [models[entry.model] for entry in recipe.models or ()]
        data = [use.open(settings.data) for use in method_data(recipe)]
        inputs = MergeInputs(
            ordered, data, align if recipe.align is not None else None, settings.device, settings.progress
        )
        solved = method(inputs, method.options_in(recipe))
        return Prepared(solved=solved, notes=[*solved.notes, *settings.data.notes], align=align)
    aligned = _aligned(recipe, donor, models, settings)
    measured = None
    if settings.data.opened:
        from isomerge.merging.measured import measure

        measured = measure(
            recipe, models, settings.data, aligned=aligned, device=settings.device, progress=settings.progress
        )
    return Prepared(aligned, measured, notes=[*(aligned.notes if aligned else ()), *settings.data.notes])


def foresee(recipe: Recipe, models: Models, settings: RunSettings) -> Prepared:
    """What can be said without running anything: all data opens, and fits what it is for."""
    from isomerge.merging.recipe_data import data_uses, require_labels

    if recipe.merge_method in DATA_METHODS:
        DATA_METHODS[recipe.merge_method].options_in(recipe)
    for use in data_uses(recipe):
        data = use.open(settings.data)
        if use.labels:
            require_labels(use, data, next(iter(models.values())))
    return Prepared(notes=settings.data.notes)


def align_options(recipe: Recipe, anchor: Checkpoint, settings: RunSettings) -> dict[str, Any] | None:
    """The arguments of `isomerge.align` beside the models; None where nothing is to be aligned."""
    if recipe.align is None:
        return None
    from isomerge.merging.recipe_data import aligning_data

    seen = aligning_data(recipe)
    return {
        **recipe.align.options(),
        "data": settings.data.open(seen).passes(anchor) if seen is not None else None,
        "threads": settings.threads,
        "max_memory": settings.max_memory,
    }


def _aligned(recipe: Recipe, donor: Checkpoint, models: Models, settings: RunSettings) -> AlignedModels | None:
    if recipe.align is None:
        return None
    from isomerge.merging.aligned import align_models

    anchor = models[recipe.align.anchor] if recipe.align.anchor else donor
    options = align_options(recipe, anchor, settings) or {}
    return align_models(list(models.values()), anchor, **options, device=settings.device, progress=settings.progress)


def solved_jobs(recipe: Recipe, solved: MergedWeights) -> list[Job]:
    """The tensors of a whole-model method: nothing is left but to round and write them."""
    from isomerge.merging.repair import finished_job

    asked = recipe.out_dtype or recipe.dtype
    dtype = parse_dtype(asked) if asked else None
    return [
        finished_job(
            name,
            TensorInfo(info.shape, dtype if dtype and info.dtype.is_floating_point else info.dtype),
            solved.tensors[name],
        )
        for name, info in solved.plan.items()
    ]


def repaired_jobs(
    recipe: Recipe,
    made: Prepared,
    jobs: Sequence[Job],
    donor: Checkpoint,
    models: Models,
    config: Mapping[str, Any],
    settings: RunSettings,
) -> tuple[list[Job], list[str]]:
    """The jobs of the repaired model, and notes."""
    from isomerge.merging.repair import parents_of, repaired

    assert recipe.repair is not None and recipe.data is not None
    references, weights, notes = parents_of(recipe)
    if made.solved is not None and made.solved.parents is not None:
        references = [references[place] for place in made.solved.parents]
        weights = [weights[place] for place in made.solved.parents]
    aligned = made.align() if made.align is not None else made.aligned
    parents = [models[r] if aligned is None else aligned.as_checkpoint(models[r]) for r in references]
    data = settings.data.open(recipe.data)
    found = repaired(
        jobs, parents, config, weights=weights, data=data, first=donor, only=recipe.repair.only,
        device=settings.device, progress=settings.progress,
    )  # fmt: skip
    return found, notes
