"""From a planned recipe to jobs: for every output tensor the sources of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from isomerge.checkpoint import Checkpoint, TensorInfo, parse_dtype
from isomerge.merging.extras import TensorFiles
from isomerge.merging.group import Source
from isomerge.merging.methods import METHODS
from isomerge.merging.pipeline import Job
from isomerge.merging.recipe import Input, ModelReference, Recipe, RecipePlan, TensorPlan
from isomerge.merging.sources import InputHashes, Stored

if TYPE_CHECKING:
    from isomerge.merging.aligned import AlignedModels
    from isomerge.merging.measured import MeasuredModels
    from isomerge.merging.vocabulary import Vocabulary


def assemble(
    recipe: Recipe,
    plan: RecipePlan,
    checkpoints: Mapping[ModelReference, Checkpoint],
    *,
    aligned: AlignedModels | None = None,
    vocabulary: Vocabulary | None = None,
    files: TensorFiles,
    measured: MeasuredModels | None = None,
    hashes: InputHashes,
    seed: int = 0,
    device: str = "cpu",
) -> list[Job]:
    """The jobs, in the order of the plan. A whole-model method is not run here and counts as the mean of the models."""
    asked = recipe.out_dtype or recipe.dtype
    dtype = parse_dtype(asked) if asked else None

    def source(given: Input) -> Source:
        checkpoint = checkpoints[given.model]
        if aligned is not None:
            return aligned.source(checkpoint, given.tensor)
        return Stored(checkpoint, given.tensor, hashes)

    jobs = []
    for tensor in _with_untied(plan, aligned).values():
        every = [*tensor.inputs, *([tensor.base] if tensor.base else [])]
        sources = [source(given) for given in every]
        if vocabulary is not None and tensor.vocabulary:
            sources = _in_one_vocabulary(vocabulary, every, sources)
        stored = _stored_info(tensor, checkpoints, aligned)
        floating = stored.dtype.is_floating_point
        method, options, extras = METHODS.get(tensor.method, METHODS["linear"]), tensor.options, {}
        if tensor.method not in METHODS:
            options = {}
        elif measured is not None and floating and tensor.method == recipe.merge_method:
            extras = measured.sources(tensor, sources[0].info.shape)
        elif floating:
            extras = files.sources(tensor, sources[0].info.shape, hashes, models=checkpoints, aligned=aligned)
        jobs.append(
            Job(
                tensor.name,
                TensorInfo(sources[0].info.shape, dtype if dtype is not None and floating else stored.dtype),
                sources[: len(tensor.inputs)],
                sources[-1] if tensor.base else None,
                method if floating else None,
                options if floating else {},
                extras,
                seed,
                device,
            )
        )
    return jobs


def _in_one_vocabulary(vocabulary: Vocabulary, inputs: list[Input], sources: list[Source]) -> list[Source]:
    """The same table of every model with one row per token of the output."""
    named = {str(given.model): rows for given, rows in zip(inputs, sources, strict=True)}
    shape = sources[0].info.shape
    axis = 1 if len(shape) > 1 and shape[0] == 1 else 0  # a bias of shape (1, tokens)
    return [vocabulary.source(str(given.model), named, axis=axis) for given in inputs]


def _stored_info(
    tensor: TensorPlan, checkpoints: Mapping[ModelReference, Checkpoint], aligned: AlignedModels | None
) -> TensorInfo:
    """What the result keeps where nothing else is asked for: the base's dtype, or the first model's."""
    first = tensor.base or tensor.inputs[0]
    known = checkpoints[first.model].tensors
    # A table that alignment has untied is stored under the name of the one it was tied to.
    return known[first.tensor] if first.tensor in known or aligned is None else aligned.plan()[first.tensor]


def _with_untied(plan: RecipePlan, aligned: AlignedModels | None) -> dict[str, TensorPlan]:
    """A rotated stream unties a shared table: the new one is merged as the one it was tied to."""
    if aligned is None:
        return plan.tensors
    tensors = dict(plan.tensors)
    for name in aligned.plan():
        if name in tensors:
            continue
        tied = aligned.tied_to(name)
        if tied is not None and tied in tensors:
            like = tensors[tied]
            tensors[name] = replace(
                like,
                name=name,
                inputs=tuple(Input(given.model, name) for given in like.inputs),
                base=Input(like.base.model, name) if like.base else None,
            )
    return tensors
