"""`isomerge.ensemble`: the mean prediction of several models, beside each of them alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.adapters.adapter import require_model
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.data.base import Batch, Data, DataSource
from isomerge.data.open import open_data
from isomerge.data.task_heads import label_names
from isomerge.errors import RequestError
from isomerge.evaluation.evaluate import require_classes
from isomerge.evaluation.external_tasks import is_external
from isomerge.evaluation.measure import labels_of, require_numbers, usual_batch
from isomerge.evaluation.task_choice import choose_task, require_fitting, task_name
from isomerge.evaluation.tasks import Task
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.running.passes import examples_in
from isomerge.running.stock import StockModel, load_model


@dataclass
class EnsembleEvaluation(Result):
    """The score of several models alone and together."""

    models: list[dict[str, Any]]
    """Each with `model`, `loss`, `metric` and `metrics`."""
    ensemble: dict[str, Any]
    """Of the mean prediction: `loss`, `metric` and `metrics`."""
    task: str
    metric_name: str
    higher_is_better: bool
    examples: int
    data: dict[str, Any]
    """Name, sha256, size and kind."""
    notes: list[str]
    seconds: float


@shows_progress
def ensemble(
    models: Sequence[Any],
    data: DataSource,
    task: str | None = None,
    *,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Shown = None,
) -> EnsembleEvaluation:
    """Measure the mean of the models' probabilities (of their numbers, where a number is predicted).

    Each model reads the data by its own tokenizer or image settings, so models of different architectures fit together
    as long as they answer the same questions. All are in memory at once. `data` is as in `isomerge.evaluate`.

    >>> record = isomerge.ensemble(["model-a", "model-b"], "cifar10.tar.xz")
    >>> 0 <= record.ensemble["metric"] <= 1
    True
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(device=(device, str, None))
    require_shared_types(task=task, batch_size=batch_size, limit=limit, seed=seed, progress=progress)
    _require(models, data, task)
    opened = open_data(data, tokenizer=tokenizer, prefer="test")
    checkpoints = [open_checkpoint(model) for model in models]
    for checkpoint in checkpoints:
        require_model(checkpoint)
    names = [task_name(checkpoint.config, task, checkpoint.name) for checkpoint in checkpoints]
    for checkpoint, name in zip(checkpoints, names, strict=True):
        require_fitting(opened, name, checkpoint.name)
        require_classes(opened, data)
        if name != names[0]:
            raise RequestError(
                f"Taking {checkpoints[0].name} and {checkpoint.name} together: one is for '{names[0]}', the other for "
                f"'{name}'. Name models of one task."
            )
        own, theirs = label_names(checkpoints[0].config), label_names(checkpoint.config)
        if own != theirs and sorted(own) == sorted(theirs):
            raise _differ(checkpoints[0], checkpoint)
    # One size for all, the smallest that any of them wants: batches go through the models side by side.
    size = batch_size or min(usual_batch(checkpoint.config, names[0]) for checkpoint in checkpoints)
    with ExitStack() as stack:
        loaded = [
            stack.enter_context(load_model(model if isinstance(model, nn.Module) else checkpoint, device))
            for model, checkpoint in zip(models, checkpoints, strict=True)
        ]
        batches = [
            opened.batches(
                one.checkpoint, batch_size=size, limit=limit, labels=True, seed=seed, device=one.device, task=names[0]
            )
            for one in loaded
        ]
        total = opened.used(limit)
        alone = [choose_task(one.checkpoint.config, names[0])() for one in loaded]
        together = choose_task(loaded[0].checkpoint.config, names[0])()
        examples = 0
        for side_by_side in _in_step(batches, loaded):
            examples += _add(side_by_side, loaded, alone, together, opened)
            if progress:
                progress(examples, max(examples, total), "evaluating")
    for one, measured in zip(loaded, alone, strict=True):
        require_numbers(measured, one.checkpoint)
    score = together.result()
    return EnsembleEvaluation(
        models=[{"model": c.name, **_numbers(t)} for c, t in zip(checkpoints, alone, strict=True)],
        ensemble=_numbers(together),
        task=names[0],
        metric_name=score.metric_name,
        higher_is_better=score.higher_is_better,
        examples=examples,
        data=opened.describe(),
        notes=list(opened.notes),
        seconds=time.perf_counter() - start,
    )


def _require(models: Sequence[Any], data: Any, task: str | None) -> None:
    require_types(models=(models, Sequence))
    if isinstance(models, str) or len(models) < 2:
        raise RequestError("Measuring an ensemble: name at least two models; for one there is isomerge eval.")
    if data is None:
        raise RequestError("Measuring an ensemble needs data. Pass data, for example a path.", keys=("data",))
    if is_external(task):
        raise RequestError(f"Measuring an ensemble: '{task}' measures one model at a time. Use isomerge eval for each.")


def _numbers(task: Task) -> dict[str, Any]:
    score = task.result()
    return {"loss": score.loss, "metric": score.metric, "metrics": score.metrics}


def _in_step(batches: Sequence[Iterator[Batch]], loaded: Sequence[StockModel]) -> Iterator[tuple[Batch, ...]]:
    for side_by_side in zip_longest(*batches):
        if None in side_by_side:  # one of them has more batches than another
            fewer = next(one for one, batch in zip(loaded, side_by_side, strict=True) if batch is None)
            more = next(one for one, batch in zip(loaded, side_by_side, strict=True) if batch is not None)
            raise _differ(more.checkpoint, fewer.checkpoint)
        yield side_by_side


def _add(
    batches: tuple[Batch, ...], loaded: Sequence[StockModel], alone: Sequence[Task], together: Task, data: Data
) -> int:
    """One batch through every model; how many examples it holds."""
    predicted: list[Tensor] = []
    right = None
    for batch, one, task in zip(batches, loaded, alone, strict=True):
        predictions, targets = task.predict(one.run(batch), labels_of(batch, data))
        task.add(predictions, targets)
        predictions, targets = predictions.cpu(), targets.cpu()
        if right is not None and not (torch.equal(right, targets) and predictions.shape == predicted[0].shape):
            raise _differ(loaded[0].checkpoint, one.checkpoint)
        right = targets
        predicted.append(predictions)
    assert right is not None
    together.add(together.combine(predicted), right)
    return examples_in(batches[0])


def _differ(first: Checkpoint, other: Checkpoint) -> RequestError:
    return RequestError(
        f"Taking {first.name} and {other.name} together: they do not answer the same questions "
        "on this data; their labels differ or are in another order, or their tokenizers cut the text differently. Name "
        "models with the same labels, and for texts to be predicted with the same tokenizer."
    )
