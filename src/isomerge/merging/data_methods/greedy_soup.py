"""Greedy soup (Wortsman et al. 2022, arXiv 2203.05482): add models to an average while it does not get worse.

DiWA (Ramé et al. 2022, arXiv 2205.09739) selects in the same way, but a model has to improve the average. What it adds
is how the models are trained: from one start, each with other settings, so that they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.evaluation.measure import require_numbers, score_batches
from isomerge.evaluation.task_choice import choose_task, require_fitting, task_name
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.state_dicts import merge_state_dicts
from isomerge.running.stock import load_model

State = dict[str, Tensor]
ROUNDING = 1e-6
"""The relative fall that is none: an average of equal models is not equal to them in the last bits."""


@data_method(
    data="one",
    passes="every model, then every average that is tried",
    labels=True,
    reference="https://arxiv.org/abs/2203.05482",
)
def greedy_soup(inputs: MergeInputs, *, tolerance: float = 0.0, strict: bool = False) -> MergedWeights:
    """Average the models that help: from the best on labelled data down, each stays unless the score falls.

    Options:
        tolerance: by how much the score may fall
        strict: a model stays only if the score rises, as in DiWA
    """
    if strict and tolerance > 0:
        raise RequestError(
            f"greedy_soup: strict asks for a score that rises, and tolerance lets it fall by {tolerance}. Use one of "
            "them.",
            keys=("strict", "tolerance"),
        )
    first, aligned = inputs.models[0], inputs.aligned()
    models = [aligned.as_checkpoint(model) for model in inputs.models] if aligned else list(inputs.models)
    changes = aligned.config_changes if aligned else {}
    score = ScoreOnTask(inputs, {**first.config, **changes})
    soup = choose_soup(models, score, tolerance=tolerance, strict=strict)
    names = [model.name for model in inputs.models]
    scores = [{"model": name, "score": score.sign * own} for name, own in zip(names, soup.own, strict=True)]
    record = {
        "metric": score.metric,
        "score": score.sign * soup.score,
        "scores": scores,
        "chosen": [names[place] for place in soup.chosen],
    }
    labels = [f"{name} {score.sign * own:.4f}" for name, own in zip(names, soup.own, strict=True)]
    inside = ", ".join(labels[place] for place in soup.chosen)
    outside = ", ".join(label for place, label in enumerate(labels) if place not in soup.chosen)
    notes = [*(aligned.notes if aligned else ()), f"in the soup, each with its own {score.metric}: {inside}"]
    notes += [f"left out of the soup: {outside}"] if outside else []
    return MergedWeights(
        soup.state, aligned.plan if aligned else first.tensors, changes, aligned.record if aligned else None, notes,
        record, soup.chosen,
    )  # fmt: skip


@dataclass(frozen=True)
class Soup:
    """What was chosen and why."""

    state: State
    """The average of the chosen models."""
    chosen: list[int]
    """In the order they were added; numbers are places in the list that was given."""
    score: float
    own: list[float]
    """Of every model by itself."""
    tried: list[tuple[int, float, bool]]
    """(model, score of the average with it, whether it stayed), in the order they were tried."""


def choose_soup(
    models: Sequence[Any], score: Callable[[State], float], *, tolerance: float = 0.0, strict: bool = False
) -> Soup:
    """Sort models by their own score (higher is better), then add each to the average unless the score falls, or with
    `strict` only if it rises.

    `score` gets a state_dict under the checkpoint's names; measure it on data that no model was trained on and that is
    not the final test. `tolerance` lets the score fall by so much. Two states are in memory at a time.

    >>> import torch
    >>> models = [{"w": torch.tensor([x])} for x in (1.0, 3.0, 9.0)]
    >>> soup = choose_soup(models, lambda state: -abs(float(state["w"]) - 2.0))
    >>> soup.chosen, float(soup.state["w"])
    ([0, 1], 2.0)
    """
    if not models:
        raise RequestError("Making a soup: there is no model. Pass a list of models.")
    own = [_scored(score, _state(model), f"model {place}") for place, model in enumerate(models, start=1)]
    order = sorted(range(len(models)), key=lambda k: (-own[k], k))
    chosen, tried = [order[0]], [(order[0], own[order[0]], True)]
    state, best = _state(models[order[0]]), own[order[0]]
    for place in order[1:]:
        # A running mean: the average so far counts as many models as it holds.
        candidate = merge_state_dicts([state, _state(models[place])], weight=[len(chosen), 1])
        value = _scored(score, candidate, f"the average with model {place + 1}")
        rounding = ROUNDING * abs(best) if math.isfinite(best) else 0.0
        stays = value > best + rounding if strict else value >= best - tolerance - rounding
        tried.append((place, value, stays))
        if stays:
            chosen.append(place)
            state, best = candidate, value
    return Soup(state, chosen, best, own, tried)


def _state(model: Any) -> State:
    checkpoint = open_checkpoint(model)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def _scored(score: Callable[[State], float], state: State, what: str) -> float:
    value = float(score(state))
    if math.isnan(value):
        raise RequestError(f"Making a soup: the score of {what} is not a number. Check the model and the data.")
    return value


class ScoreOnTask:
    """The metric of the models' own task, on the method's data; higher is better."""

    def __init__(self, inputs: MergeInputs, config: Mapping[str, Any]) -> None:
        first, (self._data,) = inputs.models[0], inputs.data
        self._inputs, self._config = inputs, dict(config)
        name = task_name(config, None, first.name)
        require_fitting(self._data.data, name, first.name)
        self._task = choose_task(config, name)
        self._batches = self._data.passes(first, labels=True, device=inputs.device)
        task = self._task()
        self.metric, self.sign = task.metric_name, 1.0 if task.higher_is_better else -1.0
        self._done = 0

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        checkpoint = MemoryCheckpoint("a model of the soup", state, self._config)
        with load_model(checkpoint, self._inputs.device) as loaded:
            task, _ = score_batches(
                [loaded.run], self._task(), self._batches, self._data.data, self._data.settings.limit
            )
            require_numbers(task, checkpoint)
        self._done += 1
        self._inputs.report(self._done, 2 * len(self._inputs.models) - 1, "scoring")
        return self.sign * float(task.result()["metric"])
