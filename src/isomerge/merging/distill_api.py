"""`isomerge.distill`: teachers in, one student out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.choices import GOALS
from isomerge.data import Data
from isomerge.data.base import DataSource
from isomerge.errors import RequestError
from isomerge.merging.api import merge
from isomerge.merging.outcome.merged import Merged
from isomerge.progress_bars import Shown, callback, shows_progress


@shows_progress
def distill(
    teachers: Sequence[Any],
    student: Any = None,
    *,
    data: DataSource,
    goals: str = "auto",
    weights: Sequence[float] | None = None,
    steps: int = 500,
    rate: float | None = None,
    temperature: float = 1.0,
    agree: float | None = None,
    fresh: bool = False,
    batch_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Shown = None,
) -> Merged:
    """Draw a student to the predictions of its teachers, by gradient steps and without labels.

    Models are whatever `isomerge.merge` takes; the student is one of the teachers (the first, if it is not named), a
    merged model, or one of another shape or architecture with the same head, labels and vocabulary. Language models of
    other vocabularies are carried to the student's. With `fresh`, only the config of the student counts and its weights
    are drawn by `seed`. `data` is one data set for all, or a list with one for each teacher.

    `goals` says whose predictions count: "mean" of all by `weights`, each teacher's "own" on its own data, or on each
    example the posterior of the teachers ("expert"). `agree`, a share from 1 / teachers to 1, chooses the shares on
    each batch so that no teacher is contradicted. Every eighth example is held out; `report().to_dict()` has under
    `distilled` how far the student was and is from the goals there, and beside it each teacher and their mean.
    `resume` names the folder that `save` will be given: a run that was killed goes on from there, to the same bytes.

    >>> student = isomerge.distill(["model-a", "model-b"], "model-a", data="cifar10.tar.xz", steps=2)
    >>> [row["model"] for row in student.details["distilled"]["held_out"]][0::4]
    ['student before', 'student after']
    """
    progress = callback(progress)
    if isinstance(teachers, (str, os.PathLike, Mapping)) or not isinstance(teachers, Sequence):
        raise RequestError("Distilling: teachers must be a list of models, as in distill([a, b], c).")
    require_types(
        goals=(goals, str), steps=(steps, int), rate=(rate, float, int, None), temperature=(temperature, float, int),
        agree=(agree, float, int, None),
        fresh=(fresh, bool), resume=(resume, str, os.PathLike, None), dtype=(dtype, str, torch.dtype, None),
    )  # fmt: skip
    require_choice("goals", goals, GOALS)
    require_shared_types(batch_size=batch_size, device=device, seed=seed, progress=progress)
    if data is None:
        raise RequestError("Distilling needs data to run the models on. Pass data, for example a path.", keys=("data",))
    if fresh and student is None:
        raise RequestError(
            "Distilling into a fresh student: none is named. Name the folder of its config.json as student.",
            keys=("student", "fresh"),
        )
    return merge(
        teachers, method="distill", base=student, weights=weights, data=in_batches(data, batch_size), dtype=dtype,
        device=device, seed=seed, resume=resume, progress=progress, goals=goals, steps=steps, rate=rate,
        temperature=temperature, agree=agree, fresh=fresh,
    )  # fmt: skip


def in_batches(data: Any, size: int | None) -> Any:
    """The same data, read in batches of this size, if one is named."""
    if size is None:
        return data
    if isinstance(data, Mapping) and "path" in data:
        return {**data, "batch_size": size}
    if isinstance(data, (str, os.PathLike, Data)):
        return {"path": data, "batch_size": size}
    if isinstance(data, (list, tuple)) and all(
        isinstance(one, (str, os.PathLike, Data)) or "path" in one for one in data
    ):
        return [in_batches(one, size) for one in data]
    raise RequestError("Distilling: batch_size is given, and data is in batches already. Leave one of them out.")
