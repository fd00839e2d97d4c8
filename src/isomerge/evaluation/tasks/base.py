"""A task turns outputs into predictions, and predictions with targets into a loss and a metric."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.errors import RequestError

IGNORED = -100  # how stock models mark a position that has no target


class Task(ABC):
    """Counts over one pass. Memory does not grow with the data, except where ranks need all numbers."""

    name: str
    metric_name: str
    higher_is_better = True

    def __init__(self) -> None:
        self.loss_sum = 0.0
        self.count = 0
        """What the loss is a mean over: examples, or tokens."""
        self.broken = 0
        """Predictions that are not a number."""

    @abstractmethod
    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions (log-probabilities, unless said otherwise) and their targets."""

    @abstractmethod
    def add(self, predictions: Tensor, targets: Tensor) -> None: ...

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """All that is known of the predictions so far; `metric_name` is one of them."""

    def together(self, predictions: Sequence[Tensor]) -> Tensor:
        """What several models say together: the logarithm of their mean probability."""
        return torch.stack(list(predictions)).logsumexp(0) - math.log(len(predictions))

    def result(self) -> dict[str, Any]:
        if not self.count:
            raise RequestError(f"Evaluating ({self.name}): the data holds nothing to predict. Use more of it.")
        metrics = self.metrics()
        return {
            "loss": self.loss_sum / self.count,
            "metric": metrics[self.metric_name],
            "metric_name": self.metric_name,
            "higher_is_better": self.higher_is_better,
            "metrics": metrics,
        }

    def _add_cross_entropy(self, predictions: Tensor, targets: Tensor) -> None:
        """Rows of log-probabilities and the number of the right output for each."""
        if not len(targets):
            return
        if int(targets.max()) >= predictions.shape[-1]:
            raise RequestError(
                f"Evaluating ({self.name}): a label is {int(targets.max())} and the model has "
                f"{predictions.shape[-1]} outputs. Use data of this model's task."
            )
        self.broken += int(predictions.isnan().any(-1).sum())
        self.loss_sum += float(F.nll_loss(predictions.double(), targets, reduction="sum"))
        self.count += len(targets)


def logits_of(outputs: Mapping[str, Any]) -> Tensor:
    """The logits, whichever name the class gives them."""
    for name in ("logits", "prediction_logits"):
        if outputs.get(name) is not None:
            return outputs[name]
    raise RequestError(
        f"Evaluating: the model gives {', '.join(outputs)} and no logits; it has no head. Use the model with the head "
        "of its task, whose class config.json names under 'architectures'."
    )


def as_log_probabilities(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)


def f1(hits: float, predicted: float, actual: float) -> float:
    """2 hits / (predicted + actual); 0 where there is neither.

    >>> f1(1, 2, 2)
    0.5
    """
    return 2 * hits / (predicted + actual) if predicted + actual else 0.0
