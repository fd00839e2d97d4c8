"""What is low on a curve: the loss of a point on labels, beside the parents' predictions, or by a function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isomerge.connectivity.curves.perturbation import Perturbation
from isomerge.connectivity.curves.volume import Point
from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import distance, rows_of, scores_in
from isomerge.running.stock import inputs_of


class Goal(ABC):
    @abstractmethod
    def loss(self, weights: Point, shares: Sequence[float], batch: Batch) -> Tensor:
        """Of a point on one batch. `shares` say how much of A and of B is wanted there, where that matters."""


class LabelGoal(Goal):
    """What the stock class makes of the labels, on inputs as they are or perturbed."""

    def __init__(self, module: Any, perturbation: Perturbation | None = None) -> None:
        self._module, self._perturbation = module, perturbation

    def loss(self, weights: Point, shares: Sequence[float], batch: Batch) -> Tensor:
        if "labels" not in batch:
            raise RequestError(
                "Training a curve towards labels: the data has no labels. Name their column with label, or set "
                "towards='predictions', which needs none.",
                keys=("data", "label", "towards"),
            )
        loss: Tensor = run(self._module, weights, batch, self._perturbation).loss
        return loss


class PredictionGoal(Goal):
    """How far a point's predictions are from the mean of the parents', each by its share; no labels are needed."""

    def __init__(self, module: Any, parents: Sequence[Point], perturbation: Perturbation | None = None) -> None:
        self._module, self._parents, self._perturbation = module, parents, perturbation

    def loss(self, weights: Point, shares: Sequence[float], batch: Batch) -> Tensor:
        batch = inputs_of(batch, self._module)
        with torch.no_grad():
            given = [scores_in(run(self._module, parent, batch)) for parent in self._parents]
        own = scores_in(run(self._module, weights, batch, self._perturbation))
        parts, padding = [], PaddingMask(batch, self._module)
        for field, scores in own.items():
            valid = padding.of_side(scores[..., 0].numel(), encoder=False)
            rows, *theirs = (rows_of(one, valid) for one in (scores, *(parent[field] for parent in given)))
            parts.append(distance(self._module, field, rows, theirs, shares))
        return torch.stack(parts).sum()


class FunctionGoal(Goal):
    """A function of the module, which has to give a loss with a gradient."""

    def __init__(self, module: nn.Module, function: Callable[[Any], Any]) -> None:
        self._applied = _Applied(module, function)

    def loss(self, weights: Point, shares: Sequence[float], batch: Batch) -> Tensor:
        found = functional_call(self._applied, {f"module.{name}": tensor for name, tensor in weights.items()}, ())
        lost = torch.is_grad_enabled() and not (isinstance(found, Tensor) and found.requires_grad)
        if lost or not isinstance(found, Tensor) or found.numel() != 1:
            raise RequestError(
                "Training a curve by loss=function: the function has to return one number as a tensor with a gradient. "
                "Compute it with torch, without no_grad, detach or item.",
                keys=("loss",),
            )
        return found.reshape(())


class _Applied(nn.Module):
    def __init__(self, module: nn.Module, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self) -> Any:
        return self._function(self.module)


def run(module: Any, weights: Point, batch: Batch, perturbation: Perturbation | None = None) -> Any:
    """The outputs of the module with other weights."""

    def plain(inputs: Batch) -> Any:
        return functional_call(module, weights, kwargs=inputs)

    return plain(batch) if perturbation is None else perturbation.run(module, batch, plain)
