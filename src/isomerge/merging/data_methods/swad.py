"""SWAD (Cha et al. 2021, arXiv 2102.08604): the mean of the checkpoints around the minimum of the validation loss.

Of a run's losses E_0 … E_n, oldest first, the window starts at the first t with E_t = min(E_t … E_{t+N_s−1}). It ends
before the last N_e of the first i with min(E_{i−N_e+1} … E_i) > r · mean(E_t … E_{t+N_s−1}), or with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.evaluation.measure import require_numbers, score_batches
from isomerge.evaluation.task_choice import choose_task, require_fitting, task_name
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.state_dicts import merge_state_dicts
from isomerge.running.stock import load_model


@dataclass(frozen=True)
class Window:
    """Places in the list of losses, from `start` up to but without `stop`."""

    start: int
    stop: int
    found: bool
    """There was a minimum; if not, the window is the last checkpoint alone."""
    ended: bool
    """The loss rose again, so no later checkpoint can be in the window."""


@data_method(
    data="one",
    passes="every model once",
    least=1,
    labels=True,
    reference="https://arxiv.org/abs/2102.08604",
)
def swad(inputs: MergeInputs, *, optimum: int = 3, overfit: int = 6, tolerance: float = 1.3) -> MergedWeights:
    """The mean of the checkpoints around the minimum of the loss on labelled data, oldest first.

    Options:
        optimum: the window starts at the first checkpoint with the lowest loss of this many: itself and those after it
        overfit: the window ends before this many checkpoints in a row above the limit
        tolerance: the limit, as a multiple of the mean loss of the first `optimum` checkpoints of the window
    """
    require_window(optimum, overfit, tolerance)
    aligned = inputs.aligned()
    models = [aligned.as_checkpoint(model) for model in inputs.models] if aligned else list(inputs.models)
    changes = aligned.config_changes if aligned else {}
    losses = _losses(inputs, models, {**inputs.models[0].config, **changes})
    window = find_window(losses, optimum, overfit, tolerance)
    places = range(window.start, window.stop)
    plan = aligned.plan if aligned else inputs.models[0].tensors
    state = {
        name: merge_state_dicts([{name: models[place].read(name)} for place in places])[name] for name in plan
    }  # fmt: skip
    names = [model.name for model in inputs.models]
    record = {
        "metric": "loss",
        "scores": [{"model": name, "score": loss} for name, loss in zip(names, losses, strict=True)],
        "chosen": [names[place] for place in places],
    }
    notes = [*(aligned.notes if aligned else ()), _told(window, losses)]
    record_of = aligned.record if aligned else None
    return MergedWeights(state, plan, changes, record_of, notes, record, list(places))


def find_window(losses: Sequence[float], optimum: int, overfit: int, tolerance: float) -> Window:
    """The window of a run whose evaluations had these losses, so far.

    >>> find_window([3.0, 1.0, 1.1, 1.2, 2.0, 2.1], optimum=3, overfit=2, tolerance=1.3)
    Window(start=1, stop=4, found=True, ended=True)
    """
    count = len(losses)
    for start in range(count - optimum + 1):
        first = losses[start : start + optimum]
        if all(map(math.isfinite, first)) and first[0] == min(first):
            break
    else:
        return Window(max(0, count - 1), count, found=False, ended=False)
    limit = tolerance * sum(first) / optimum
    for last in range(max(start + optimum, overfit - 1), count):
        stop = last - overfit + 1
        if min(losses[stop : last + 1]) > limit:
            return Window(start, stop, found=True, ended=True)
    return Window(start, count, found=True, ended=False)


def require_window(optimum: int, overfit: int, tolerance: float) -> None:
    """Raise unless the window always has its minimum in it."""
    if optimum < 1 or overfit < 1 or not 1 <= tolerance < math.inf:
        raise RequestError(
            f"Choosing a window of checkpoints: optimum={optimum} and overfit={overfit} must be at least 1, and the "
            f"tolerance ({tolerance}), a multiple of the loss, at least 1.",
            keys=("optimum", "overfit", "tolerance"),
        )


def _losses(inputs: MergeInputs, models: Sequence[Checkpoint], config: Mapping[str, Any]) -> list[float]:
    """Of every model on the method's data."""
    first, (data,) = inputs.models[0], inputs.data
    name = task_name(config, None, first.name)
    require_fitting(data.data, name, first.name)
    make, batches = choose_task(config, name), data.passes(first, labels=True, device=inputs.device)
    losses = []
    for done, model in enumerate(models, start=1):
        with load_model(model, inputs.device) as loaded:
            task, _ = score_batches([loaded.run], make(), batches, data.data, data.settings.limit)
        require_numbers(task, model)
        losses.append(task.loss_sum / task.count)
        inputs.report(done, len(models), "scoring")
    return losses


def _told(window: Window, losses: Sequence[float]) -> str:
    if not window.found:
        return (
            "the loss has no minimum among these checkpoints, so the result is the last one; use checkpoints of a "
            "longer run, or a smaller `optimum`"
        )
    least = min(losses[window.start : window.stop])
    return f"in the window: checkpoints {window.start + 1} to {window.stop} of {len(losses)}, least loss {least:.4f}"
