"""Losses of a few parameters, and problems on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.connectivity.curves.goals import FunctionGoal
from isomerge.connectivity.curves.problem import CurveProblem
from isomerge.connectivity.curves.space import WeightSpace
from isomerge.running.weight_replacement import Mixture


class Place(nn.Module):
    """A model whose weights are a place."""

    def __init__(self, *place: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(place, dtype=torch.float64))


def ring(model: Any) -> Tensor:
    """(|w|² − 1)²: zero on the circle, one in its middle."""
    return (model.w.square().sum() - 1) ** 2


def space_of(a: nn.Module, b: nn.Module) -> WeightSpace:
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in (a, b)]
    return WeightSpace(Mixture(a, states))


def problem_on(
    loss: Callable[[Any], Tensor], a: nn.Module, b: nn.Module, *, steps: int = 300, rate: float = 0.05, **more: Any
) -> CurveProblem:
    space = space_of(a, b)
    settings: dict[str, Any] = {"pivots": 1, "spread": 0.0, "seed": 0, **more}
    goal = FunctionGoal(space.mixture.module, loss)
    return CurveProblem(space, goal, itertools.repeat({}), steps, rate, **settings)
