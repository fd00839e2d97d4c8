"""REPAIR as the last step of a merge: the units of the result get the mean and spread they have in its parents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.merging.data_sets import DataSet, told
from isomerge.merging.recipe import ModelReference, Recipe
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import InMemory
from isomerge.merging.whole import EVERY


def repaired(
    jobs: Sequence[Job],
    parents: Sequence[Checkpoint],
    config: Mapping[str, Any],
    *,
    weights: Sequence[float],
    data: DataSet,
    first: Checkpoint,
    only: str | None,
    device: str,
    progress: Callable[[int, int, str], None] | None,
) -> list[Job]:
    """Jobs for the repaired tensors. The merged model is made in memory, and rounded only when it is
    written; `first` is the model whose tokenizer or image settings make the batches."""
    from isomerge.merging.statistics import repair

    state = {job.name: job.tensor() for job in jobs}
    merged = MemoryCheckpoint("the merged model", state, dict(config))
    batches = told(data.passes(first), data.examples, progress, "repairing")
    state |= repair(merged, parents, batches, weight=weights, only=only, device=device)
    return [solved_job(job.name, job.info, state[job.name]) for job in jobs]


def solved_job(name: str, info: TensorInfo, tensor: Tensor) -> Job:
    """A tensor that is already there: it is only rounded and written."""
    return Job(name, info, [InMemory(tensor, f"tensor '{name}', solved")], None, None)


def parents_of(recipe: Recipe) -> tuple[list[ModelReference], list[float], list[str]]:
    """The models that were merged, how much each counts, and a note where that is not one number for each."""
    method = EVERY[recipe.merge_method]
    entries = [e for e in recipe.models or () if method.base == "ignored" or e.model != recipe.base_model]
    shared = (recipe.parameters or {}).get("weight", 1.0)
    given = [(entry.parameters or {}).get("weight", shared) for entry in entries]
    plain = [float(one) for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]
    models = [entry.model for entry in entries]
    if len(plain) == len(given) and sum(plain) > 0:
        return models, plain, []
    return models, [1.0] * len(models), ["repair: every parent counts the same, as 'weight' is not one number for each"]
