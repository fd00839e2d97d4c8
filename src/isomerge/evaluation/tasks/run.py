"""`isomerge.evaluate`: a model on data, one loss and one metric."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from isomerge.adapters.adapter import require_model
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.data.base import Batches, Data
from isomerge.data.corpus import LONGEST
from isomerge.data.images import is_image
from isomerge.data.open import open_data
from isomerge.data.tokenizer import POSITIONS
from isomerge.errors import CheckpointError, RequestError
from isomerge.evaluation.tasks.base import Task
from isomerge.evaluation.tasks.choose import HARNESS, choose_task, require_fitting, task_name
from isomerge.evaluation.tasks.custom import find_function, is_custom, measure
from isomerge.evaluation.tasks.harness import run_harness
from isomerge.evaluation.tasks.model import Loaded, load_model

Progress = Callable[[int, int, str], None]

BATCH = 64
LOGITS = 1 << 29  # bytes of logits that one batch of a language model may take


def evaluate(
    model: Any,
    data: str | Path | Data | Any = None,
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
    """Run a model (path, hub id, module) over data and measure it.

    The task is told from the class in config.json. It may also be `module.path:function`, called as
    f(model, batches), or `lm-eval:NAME`, which brings its own data. The record has `loss`, `metric`, `metric_name`,
    `higher_is_better`, `metrics`, `examples`, `seconds`, `task`, `model`, `data` (name, sha256, size, kind), `notes`.

    >>> isomerge.evaluate("model-a", "cifar10.tar.xz", split="test")["metric_name"]
    'accuracy'
    """
    start = time.perf_counter()
    own = is_custom(task) or (task or "").startswith(HARNESS)
    opened = None
    if data is not None:
        opened = open_data(
            data, kind=kind, split=split, text=text, label=label, length=length, tokenizer=tokenizer, prefer="test"
        )
    elif not own:
        raise RequestError("Evaluating without data: name the data with --data PATH.")
    checkpoint = open_checkpoint(model)
    require_model(checkpoint)
    name = task if own and task is not None else task_name(checkpoint.config, task, checkpoint.name)
    if opened is not None and not own:
        require_fitting(opened, name, checkpoint.name)
        require_classes(opened, data)
    with load_model(model if isinstance(model, nn.Module) else checkpoint, device) as loaded:
        found, examples = _measure(loaded, name, opened, batch_size, limit, seed, tokenizer, progress)
    record = {"model": checkpoint.name, "task": name, **found, "examples": examples}
    record["data"] = None if opened is None else describe(opened)
    record["notes"] = [] if opened is None else list(opened.notes)
    if found["metric"] is not None and math.isnan(found["metric"]):
        record["notes"].append(f"{found['metric_name']} has no value: the predictions or the targets are all the same")
    record["seconds"] = time.perf_counter() - start
    return record


def require_classes(data: Data, source: Any) -> None:
    """Refuse images without class folders, as those of one class alone are; `source` is how they were named."""
    if data.kind != "images" or data.classes:
        return
    step = "Put each into a folder named after its class, and name the folder that holds these."
    if isinstance(source, (str, Path)) and (folder := Path(source).expanduser()).is_dir():
        above = folder.parent if folder.name and folder.parent.name else folder.absolute().parent
        holding = [p.name for p in above.iterdir() if p.is_dir() and any(is_image(file.name) for file in p.iterdir())]
        if len(holding) > 1:
            step = f"Name the folder above, {above}, if {name_some(sorted(holding), 3)} are its classes."
    raise RequestError(f"Evaluating on {data.name}: its images are in no class folders, so they have no labels. {step}")


def describe(data: Data) -> dict[str, Any]:
    return {"name": data.name, "sha256": data.sha256, "size": data.size, "kind": data.kind}


def one_pass(
    runs: list[Callable[[Any], Any]],
    task: Task,
    batches: Batches,
    data: Data,
    limit: int | None,
    progress: Progress | None = None,
    what: str = "evaluating",
) -> tuple[Task, int]:
    """All batches through one model, or through several whose predictions are taken together."""
    done = 0
    total = data.size if limit is None else min(limit, data.size)
    for batch in batches():
        labels = batch.get("labels")
        if labels is None:
            raise RequestError(
                f"Evaluating on {data.name}: it has no labels. Name their column with --label, or use labelled data."
            )
        said = []
        for run in runs:
            predictions, targets = task.predict(run(batch), labels)
            said.append(predictions)
        task.add(said[0] if len(said) == 1 else task.together(said), targets)
        done += len(labels)
        if progress:
            progress(done, max(done, total), what)
    return task, done


def require_numbers(task: Task, loaded: Loaded) -> None:
    if task.broken:
        raise CheckpointError(
            f"Evaluating {loaded.checkpoint.name}: {task.broken} of {task.count} predictions are not a number (NaN). "
            "Its weights hold NaN or numbers too large for their dtype; 'isomerge verify' says which tensor."
        )


def usual_batch(config: dict[str, Any], task: str) -> int:
    """As many examples as make logits of a bounded size."""
    if task not in ("causal-lm", "masked-lm", "seq2seq"):
        return BATCH
    positions = next((int(config[key]) for key in POSITIONS if config.get(key)), LONGEST)
    row = 4 * int(config.get("vocab_size") or 32000) * min(positions, LONGEST)
    return max(1, min(BATCH, LOGITS // row))


def _measure(
    loaded: Loaded,
    name: str,
    data: Data | None,
    batch_size: int | None,
    limit: int | None,
    seed: int,
    tokenizer: Any,
    progress: Progress | None,
) -> tuple[dict[str, Any], int | None]:
    """The numbers, and how many examples they are from."""
    config = loaded.checkpoint.config
    if name.startswith(HARNESS):
        task = name.removeprefix(HARNESS)
        return run_harness(loaded, task, batch_size=batch_size or 8, limit=limit, tokenizer=tokenizer), limit
    if data is None:
        return measure(find_function(name), name, loaded.module, None), None
    size = batch_size or (BATCH if is_custom(name) else usual_batch(config, name))
    batches = data.passes(
        loaded.checkpoint, batch_size=size, limit=limit, labels=True, seed=seed, device=loaded.device,
        task=None if is_custom(name) else name,
    )  # fmt: skip
    if is_custom(name):
        examples = data.size if limit is None else min(limit, data.size)
        return measure(find_function(name), name, loaded.module, batches()), examples
    task_of_model, examples = one_pass([loaded.run], choose_task(config, name)(), batches, data, limit, progress)
    require_numbers(task_of_model, loaded)
    return task_of_model.result(), examples
