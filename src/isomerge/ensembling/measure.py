"""`isomerge.ensemble`: the prediction of several models together, beside each of them alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from isomerge.arguments import require_types
from isomerge.checkpoint.base import Progress
from isomerge.data.base import Data, DataSource
from isomerge.data.open import open_data
from isomerge.ensembling.api import EnsembleRequest
from isomerge.ensembling.combinations import COMBINATIONS
from isomerge.ensembling.manifest import free_place, named_ensemble
from isomerge.ensembling.members import differ, unfolded
from isomerge.ensembling.module import Ensemble
from isomerge.errors import RequestError
from isomerge.evaluation.evaluate import require_classes
from isomerge.evaluation.external_tasks import is_external
from isomerge.evaluation.measure import labels_of, require_numbers
from isomerge.evaluation.tasks import Task
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.running.passes import examples_in


@dataclass
class EnsembleEvaluation(Result):
    """The score of several models alone and together."""

    models: list[dict[str, Any]]
    """Each with `model`, `loss`, `metric` and `metrics`."""
    ensemble: dict[str, Any]
    """Of the combined prediction: `loss`, `metric` and `metrics`."""
    task: str
    metric_name: str
    higher_is_better: bool
    examples: int
    data: dict[str, Any]
    """Name, sha256, size and kind."""
    notes: list[str]
    seconds: float
    combination: str
    weights: list[float]
    """How much each model counts, where the combination has weights."""
    saved: str | None = None
    """Where its manifest is."""
    OPTIONAL: ClassVar[tuple[str, ...]] = ("saved",)


@shows_progress
def ensemble(
    models: Sequence[Any] | Ensemble,
    data: DataSource,
    task: str | None = None,
    *,
    combination: str = "probability",
    weights: Sequence[float] | None = None,
    held_out: DataSource = None,
    ridge: float | None = None,
    snapshots: int | None = None,
    save: str | os.PathLike[str] | None = None,
    force: bool = False,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Shown = None,
) -> EnsembleEvaluation:
    """Measure what models predict together (the mean of their probabilities, or of numbers), beside each of them alone.

    Each model reads the data by its own tokenizer or image settings, so models of different architectures fit together
    as long as they answer the same questions. All are in memory at once. `data` is as in `isomerge.evaluate`; the other
    arguments are those of `isomerge.make_ensemble`, whose result, or manifest, may stand in the place of the models.
    Without `held_out`, what has to be fitted is fitted on the part of the data called validation. `save` keeps the
    manifest of the ensemble, and `force` replaces one.

    >>> record = isomerge.ensemble(["model-a", "model-b"], "cifar10.tar.xz")
    >>> 0 <= record.ensemble["metric"] <= 1
    True
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(save=(save, str, os.PathLike, None), force=(force, bool), device=(device, str, None))
    made = models if isinstance(models, Ensemble) else named_ensemble(models, device)
    named: Sequence[Any] = [] if isinstance(models, Ensemble) else models
    request = EnsembleRequest(
        named, combination, weights, held_out, ridge, snapshots, task, tokenizer, batch_size, limit, seed, device,
        progress,
    )  # fmt: skip
    _require(request, made, data)
    target = None if save is None else free_place(save, force=force)
    opened = open_data(data, tokenizer=tokenizer, prefer="test")
    with _as_they_were(named if made is None else ()):
        if made is None:
            made = _needing_parts(request, data).build(opened)
        require_classes(opened, data)
        result = _measured(made, opened, request)
        if target is not None:
            result.saved = str(made.save(target, force=force))
    result.seconds = time.perf_counter() - start
    return result


def _measured(made: Ensemble, opened: Data, request: EnsembleRequest) -> EnsembleEvaluation:
    alone, together = [made.new_task() for _ in made.stock], made.new_task()
    examples = _score(made, opened, request, alone, together)
    for one, measured in zip(made.stock, alone, strict=True):
        require_numbers(measured, one.checkpoint)
    described = opened.describe()
    if made.fitted_on and made.fitted_on.get("sha256") == described["sha256"]:
        raise RequestError(
            f"Measuring an ensemble on {opened.name}: {made.combination.name} was fitted on the same data. Pass other "
            "data as held_out.",
            keys=("held_out",),
        )
    score = together.result()
    return EnsembleEvaluation(
        models=[{"model": one.checkpoint.name, **_numbers(t)} for one, t in zip(made.stock, alone, strict=True)],
        ensemble=_numbers(together),
        task=made.task,
        metric_name=score.metric_name,
        higher_is_better=score.higher_is_better,
        examples=examples,
        data=described,
        notes=[*made.notes, *opened.notes],
        seconds=0.0,
        combination=made.combination.name,
        weights=made.shares.weights.tolist(),
    )


def _score(made: Ensemble, opened: Data, request: EnsembleRequest, alone: Sequence[Task], together: Task) -> int:
    """All batches through every model; how many examples there were."""
    examples, total = 0, opened.used(request.limit)
    progress: Progress | None = request.progress
    read = made.read(opened, batch_size=request.batch_size, limit=request.limit, seed=request.seed)
    for batches in read:
        logits = made.member_logits(batches)
        right = None
        for one, task, own, batch in zip(made.stock, alone, logits, batches, strict=True):
            predictions, targets = task.predict({"logits": own}, labels_of(batch, opened).to(own.device))
            task.add(predictions, targets)
            if right is not None and not (torch.equal(right, targets.cpu()) and own.shape == logits[0].shape):
                raise differ(made.stock[0].checkpoint, one.checkpoint)
            right = targets.cpu()
        joined = made.join(logits, batches[0])
        together.add(*together.predict({"logits": joined}, labels_of(batches[0], opened).to(joined.device)))
        examples += examples_in(batches[0])
        if progress:
            progress(examples, max(examples, total), "evaluating")
    return examples


def _require(request: EnsembleRequest, made: Ensemble | None, data: Any) -> None:
    if made is None and len(unfolded(request.models, request.snapshots)) < 2:
        raise RequestError("Measuring an ensemble: name at least two models; for one there is isomerge eval.")
    if data is None:
        raise RequestError("Measuring an ensemble needs data. Pass data, for example a path.", keys=("data",))
    if is_external(request.task):
        raise RequestError(
            f"Measuring an ensemble: '{request.task}' measures one model at a time. Use isomerge eval for each."
        )
    changed = (request.combination, request.weights, request.held_out, request.snapshots, request.task)
    if made is not None and changed != ("probability", None, None, None, None):
        raise RequestError(
            "Measuring an ensemble that is made already: how it combines its members is decided. Leave combination, "
            "weights, held_out, snapshots and task out, or name the models."
        )


def _needing_parts(request: EnsembleRequest, data: Any) -> EnsembleRequest:
    """With the part called validation as the held-out data, where some is needed and none was named."""
    needs = getattr(COMBINATIONS.get(request.combination), "finds", None) and request.weights is None
    source = data if isinstance(data, Mapping) else {"path": data}
    if not needs or request.held_out is not None or not isinstance(source.get("path"), (str, os.PathLike)):
        return request
    try:
        part = open_data({**source, "split": "validation"}, tokenizer=request.tokenizer)
    except RequestError as error:
        raise RequestError(
            f"Combining models by '{request.combination}' needs labelled data that no model was trained on, and "
            f"{source['path']} has no part called validation. Pass held_out.",
            keys=("held_out",),
        ) from error
    return replace(request, held_out=part)


@contextlib.contextmanager
def _as_they_were(models: Any) -> Iterator[None]:
    """Modules are given back on their device, and training if they were."""
    modules: list[Any] = [model for model in models if isinstance(model, nn.Module)]
    before = [(next(module.parameters()).device, module.training) for module in modules]
    try:
        yield
    finally:
        for module, (home, training) in zip(modules, before, strict=True):
            module.to(home).train(training)


def _numbers(task: Task) -> dict[str, Any]:
    score = task.result()
    return {"loss": score.loss, "metric": score.metric, "metrics": score.metrics}
