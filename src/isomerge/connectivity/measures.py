"""What is measured along the way: a function of the user's, or a task over data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.connectivity.ends import Ends
from isomerge.data.base import Batch, Batches, Data
from isomerge.errors import RequestError
from isomerge.evaluation.tasks.base import Task
from isomerge.evaluation.tasks.choose import HARNESS, choose_task, require_fitting, task_name
from isomerge.evaluation.tasks.custom import find_function, is_custom, measure
from isomerge.evaluation.tasks.model import Loaded
from isomerge.evaluation.tasks.run import BATCH, describe, one_pass, usual_batch

Numbers = dict[str, float | None]


@dataclass
class Measure:
    """`at` gives loss and metric of a mixture; `ensemble` those of the models' mean prediction, where there is one."""

    task: str
    at: Callable[[Ends, list[float]], Numbers]
    ensemble: Callable[[Ends], Numbers | None] = lambda ends: None
    facts: dict[str, Any] = field(default_factory=dict)
    """Filled while measuring: the metric's name, how many examples."""


def by_loss(loss: Callable[[Any], Any]) -> Measure:
    """A function of the module that gives the loss."""

    def at(ends: Ends, shares: list[float]) -> Numbers:
        return {"loss": float(loss(ends.mix(shares))), "metric": None}

    return Measure("loss", at)


def by_data(
    data: Data,
    task: str | None,
    checkpoint: Checkpoint,
    *,
    batch_size: int | None,
    limit: int | None,
    seed: int,
    device: str,
) -> Measure:
    """A task over data, prepared once by the first model's tokenizer or image settings."""
    if task is not None and task.startswith(HARNESS):
        raise RequestError("Measuring between models: the tasks of lm-eval take too long for every point. Use --data.")
    name = task if is_custom(task) else task_name(checkpoint.config, task, checkpoint.name)
    assert name is not None
    if not is_custom(task):
        require_fitting(data, name, checkpoint.name)
    size = batch_size or (BATCH if is_custom(task) else usual_batch(checkpoint.config, name))
    batches = data.passes(
        checkpoint, batch_size=size, limit=limit, labels=True, seed=seed, device=device,
        task=None if is_custom(task) else name,
    )  # fmt: skip
    facts: dict[str, Any] = {}
    if is_custom(task):
        function = find_function(name)

        def at_custom(ends: Ends, shares: list[float]) -> Numbers:
            found = measure(function, name, ends.mix(shares), batches())
            facts.update({key: found[key] for key in ("metric_name", "higher_is_better")})
            return {"loss": found["loss"], "metric": found["metric"]}

        return Measure(name, at_custom, facts=facts)
    fresh = choose_task(checkpoint.config, name)
    tell = partial(_numbers, batches=batches, data=data, limit=limit, facts=facts)

    def run(ends: Ends, shares: list[float], batch: Batch, *, place: bool) -> Any:
        return Loaded(checkpoint, ends.mix(shares) if place else ends.module, device).run(batch)

    def at(ends: Ends, shares: list[float]) -> Numbers:
        ends.mix(shares)
        return tell(fresh(), [partial(run, ends, shares, place=False)])

    def ensemble(ends: Ends) -> Numbers:
        # The one module takes turns with the weights of each model, batch by batch: nothing grows with the data.
        count = len(ends.weights)
        corners = [[float(k == n) for k in range(count)] for n in range(count)]
        return tell(fresh(), [partial(run, ends, corner, place=True) for corner in corners])

    return Measure(name, at, ensemble, facts)


def _numbers(
    task: Task,
    runs: list[Callable[[Batch], Any]],
    *,
    batches: Batches,
    data: Data,
    limit: int | None,
    facts: dict[str, Any],
) -> Numbers:
    done, examples = one_pass(runs, task, batches, data, limit)
    found = done.result()
    facts.update(
        metric_name=found["metric_name"], higher_is_better=found["higher_is_better"], examples=examples,
        data=facts.get("data") or describe(data),
    )  # fmt: skip
    if done.broken:  # a mixture may break where no model does; that is an answer, not an error
        return {"loss": math.nan, "metric": math.nan}
    return {"loss": found["loss"], "metric": found["metric"]}
