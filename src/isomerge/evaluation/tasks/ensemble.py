"""`isomerge.ensemble`: the mean prediction of several models, beside each of them alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isomerge.adapters.adapter import require_model
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.data.base import Batch, Data
from isomerge.data.heads import label_names
from isomerge.data.open import open_data
from isomerge.errors import RequestError
from isomerge.evaluation.tasks.base import Task
from isomerge.evaluation.tasks.choose import HARNESS, choose_task, require_fitting, task_name
from isomerge.evaluation.tasks.custom import is_custom
from isomerge.evaluation.tasks.model import Loaded, load_model
from isomerge.evaluation.tasks.run import describe, require_classes, require_numbers, usual_batch

Progress = Callable[[int, int, str], None]


def ensemble(
    models: Sequence[Any],
    data: str | Path | Data | Any,
    task: str | None = None,
    *,
    split: str | None = None,
    text: str | None = None,
    label: str | None = None,
    kind: str | None = None,
    length: int | None = None,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the mean of the models' probabilities (of their numbers, where a number is predicted).

    Each model reads the data by its own tokenizer or image settings, so models of different architectures fit together
    as long as they answer the same questions. All are in memory at once. The record has `models[]` and `ensemble`,
    each with `loss`, `metric` and `metrics`, and what `isomerge.evaluate` says of task and data.

    >>> record = isomerge.ensemble(["model-a", "model-b"], "cifar10.tar.xz")
    >>> 0 <= record["ensemble"]["metric"] <= 1
    True
    """
    start = time.perf_counter()
    _require(models, data, task)
    opened = open_data(
        data, kind=kind, split=split, text=text, label=label, length=length, tokenizer=tokenizer, prefer="test"
    )
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
        total = opened.size if limit is None else min(limit, opened.size)
        alone = [choose_task(one.checkpoint.config, names[0])() for one in loaded]
        together = choose_task(loaded[0].checkpoint.config, names[0])()
        examples = 0
        for side_by_side in _in_step(batches, loaded):
            examples += _add(side_by_side, loaded, alone, together, opened)
            if progress:
                progress(examples, max(examples, total), "evaluating")
    for one, measured in zip(loaded, alone, strict=True):
        require_numbers(measured, one)
    whole = together.result()
    return {
        "models": [{"model": c.name, **_numbers(t)} for c, t in zip(checkpoints, alone, strict=True)],
        "ensemble": _numbers(together),
        "task": names[0],
        "metric_name": whole["metric_name"],
        "higher_is_better": whole["higher_is_better"],
        "examples": examples,
        "data": describe(opened),
        "notes": list(opened.notes),
        "seconds": time.perf_counter() - start,
    }


def _require(models: Sequence[Any], data: Any, task: str | None) -> None:
    if isinstance(models, (str, Path)) or len(models) < 2:
        raise RequestError("Measuring an ensemble: name at least two models; for one there is isomerge eval.")
    if data is None:
        raise RequestError("Measuring an ensemble needs data: name it with --data PATH.")
    if is_custom(task) or (task or "").startswith(HARNESS):
        raise RequestError(f"Measuring an ensemble: '{task}' measures one model at a time. Use isomerge eval for each.")


def _numbers(task: Task) -> dict[str, Any]:
    found = task.result()
    return {key: found[key] for key in ("loss", "metric", "metrics")}


def _in_step(batches: Sequence[Iterator[Batch]], loaded: Sequence[Loaded]) -> Iterator[tuple[Batch, ...]]:
    for side_by_side in zip_longest(*batches):
        if None in side_by_side:  # one of them has more batches than another
            fewer = next(one for one, batch in zip(loaded, side_by_side, strict=True) if batch is None)
            more = next(one for one, batch in zip(loaded, side_by_side, strict=True) if batch is not None)
            raise _differ(more.checkpoint, fewer.checkpoint)
        yield side_by_side


def _add(
    batches: tuple[Batch, ...], loaded: Sequence[Loaded], alone: Sequence[Task], together: Task, data: Data
) -> int:
    """One batch through every model; how many examples it holds."""
    said, right = [], None
    for batch, one, task in zip(batches, loaded, alone, strict=True):
        labels = batch.get("labels")
        if labels is None:
            raise RequestError(
                f"Measuring an ensemble on {data.name}: it has no labels. Name their column with --label, or use "
                "labelled data."
            )
        predictions, targets = task.predict(one.run(batch), labels)
        task.add(predictions, targets)
        predictions, targets = predictions.cpu(), targets.cpu()
        if right is not None and not (torch.equal(right, targets) and predictions.shape == said[0].shape):
            raise _differ(loaded[0].checkpoint, one.checkpoint)
        right = targets
        said.append(predictions)
    assert right is not None
    together.add(together.together(said), right)
    return len(next(iter(batches[0].values())))


def _differ(first: Checkpoint, other: Checkpoint) -> RequestError:
    return RequestError(
        f"Taking {first.name} and {other.name} together: they do not answer the same questions "
        "on this data; their labels differ or are in another order, or their tokenizers cut the text differently. Name "
        "models with the same labels, and for texts to be predicted with the same tokenizer."
    )
