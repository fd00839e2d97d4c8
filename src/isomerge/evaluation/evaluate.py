"""`isomerge.evaluate`: a model on data, one loss and one metric."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from isomerge.adapters.adapter import require_model
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.data.base import Data, DataSource
from isomerge.data.images import is_image
from isomerge.data.open import open_data
from isomerge.errors import RequestError
from isomerge.evaluation.external_tasks import HARNESS, call_function, find_function, is_external, run_harness
from isomerge.evaluation.measure import DataMeasure
from isomerge.evaluation.task_choice import task_name
from isomerge.evaluation.tasks import TaskScore
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.running.stock import load_model


@dataclass
class Evaluation(Result):
    """A model's score on data."""

    model: str
    task: str
    loss: float | None
    metric: float | None
    metric_name: str
    higher_is_better: bool
    metrics: dict[str, float]
    examples: int | None
    data: dict[str, Any] | None
    """Name, sha256, size and kind."""
    notes: list[str]
    seconds: float


@shows_progress
def evaluate(
    model: Any,
    data: DataSource = None,
    task: str | None = None,
    *,
    tokenizer: Any = None,
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: Shown = None,
) -> Evaluation:
    """Run a model (path, hub id, module) over data and measure it.

    `data` is a path, opened data, batches, or a mapping with a path and `DataOptions`. The class in config.json decides
    the task, unless `task` is `module.path:function`, called as f(model, batches), or `lm-eval:NAME`, which brings its
    own data. `limit` is the number of examples to use, `tokenizer` is for models in memory.

    >>> result = isomerge.evaluate("model-a", {"path": "cifar10.tar.xz", "split": "test"})
    >>> result.metric_name, 0 <= result.metric <= 1
    ('accuracy', True)
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(device=(device, str, None))
    require_shared_types(task=task, batch_size=batch_size, limit=limit, seed=seed, progress=progress)
    external = is_external(task)
    if data is None and not external:
        raise RequestError("Evaluating needs data. Pass data, for example a path.", keys=("data",))
    opened = None if data is None else open_data(data, tokenizer=tokenizer, prefer="test")
    checkpoint = open_checkpoint(model)
    require_model(checkpoint)
    name = task if external and task is not None else task_name(checkpoint.config, task, checkpoint.name)
    measure = None
    if opened is not None and not name.startswith(HARNESS):
        measure = DataMeasure(
            opened, task, checkpoint, batch_size=batch_size, limit=limit, seed=seed, device=_device(model, device)
        )
        if not external:
            require_classes(opened, data)
    examples: int | None = None
    with load_model(model if isinstance(model, nn.Module) else checkpoint, device) as loaded:
        if measure is not None:
            score, examples = measure.evaluate(loaded.module, progress)
        elif name.startswith(HARNESS):
            harness_task, examples = name.removeprefix(HARNESS), limit
            score = run_harness(loaded, harness_task, batch_size=batch_size or 8, limit=limit, tokenizer=tokenizer)
        else:
            score = call_function(find_function(name), name, loaded.module, None)
    notes = [] if opened is None else list(opened.notes)
    described = None if opened is None else opened.describe()
    seconds = time.perf_counter() - start
    return Evaluation(
        checkpoint.name, name, **vars(score), examples=examples, data=described, notes=[*notes, *_remarks(score)],
        seconds=seconds,
    )  # fmt: skip


def _device(model: Any, device: str | None) -> str:
    home = next(model.parameters()).device if isinstance(model, nn.Module) else "cpu"
    return str(device or home)


def _remarks(score: TaskScore) -> list[str]:
    if score.metric is None or not math.isnan(score.metric):
        return []
    return [f"{score.metric_name} has no value: the predictions or the targets are all the same"]


def require_classes(data: Data, source: Any) -> None:
    """Refuse images without class folders, as those of one class alone are; `source` is how they were named."""
    if data.kind != "images" or data.classes:
        return
    step = "Put each into a folder named after its class, and name the folder that holds these."
    source = source.get("path") if isinstance(source, Mapping) else source
    if isinstance(source, (str, Path)) and (folder := Path(source).expanduser()).is_dir():
        above = folder.parent if folder.name and folder.parent.name else folder.absolute().parent
        holding = [p.name for p in above.iterdir() if p.is_dir() and any(is_image(file.name) for file in p.iterdir())]
        if len(holding) > 1:
            step = f"Name the folder above, {above}, if {name_some(sorted(holding), 3)} are its classes."
    raise RequestError(f"Evaluating on {data.name}: its images are in no class folders, so they have no labels. {step}")
