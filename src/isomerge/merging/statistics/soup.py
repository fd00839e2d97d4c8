"""Greedy soup (Wortsman et al. 2022, arXiv 2203.05482): add models to an average while it does not get worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isomerge.checkpoint import open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.state_dicts import merge_state_dicts

State = dict[str, Tensor]
ROUNDING = 1e-6
"""The relative fall that is none: an average of equal models is not equal to them in the last bits."""


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


def greedy_soup(models: Sequence[Any], score: Callable[[State], float], *, tolerance: float = 0.0) -> Soup:
    """Sort models by their own score (higher is better), then add each to the average unless the score falls.

    `score` gets a state_dict under the checkpoint's names; measure it on data that no model was trained on and that is
    not the final test. `tolerance` lets the score fall by so much. Two states are in memory at a time.

    >>> import torch
    >>> models = [{"w": torch.tensor([x])} for x in (1.0, 3.0, 9.0)]
    >>> soup = greedy_soup(models, lambda state: -abs(float(state["w"]) - 2.0))
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
        found = _scored(score, candidate, f"the average with model {place + 1}")
        slack = tolerance + (ROUNDING * abs(best) if math.isfinite(best) else 0.0)
        kept = found >= best - slack
        tried.append((place, found, kept))
        if kept:
            chosen.append(place)
            state, best = candidate, found
    return Soup(state, chosen, best, own, tried)


def _state(model: Any) -> State:
    checkpoint = open_checkpoint(model)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def _scored(score: Callable[[State], float], state: State, what: str) -> float:
    found = float(score(state))
    if math.isnan(found):
        raise RequestError(f"Making a soup: the score of {what} is not a number. Check the model and the data.")
    return found
