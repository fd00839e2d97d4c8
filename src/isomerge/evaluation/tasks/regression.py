"""A number to predict: how well the predictions follow it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.evaluation.tasks.base import Task, logits_of


class Regression(Task):
    """Pearson's and Spearman's correlation; the loss is the mean squared error. Predictions are the numbers."""

    name = "regression"
    metric_name = "pearson"

    def __init__(self) -> None:
        super().__init__()
        self._said: list[float] = []
        self._right: list[float] = []

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        if logits.shape[-1] != 1:
            raise RequestError(
                f"Evaluating (regression): the model has {logits.shape[-1]} outputs, and a number to predict needs one."
            )
        return logits[..., 0].double(), labels.double()

    def together(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self.broken += int(predictions.isnan().sum())
        self.loss_sum += float(((predictions - targets) ** 2).sum())
        self.count += len(targets)
        self._said += predictions.tolist()
        self._right += targets.tolist()

    def metrics(self) -> dict[str, float]:
        from scipy import stats

        constant = len(set(self._said)) < 2 or len(set(self._right)) < 2
        if constant or self.broken:
            return {"pearson": math.nan, "spearman": math.nan}
        return {
            "pearson": float(stats.pearsonr(self._said, self._right).statistic),
            "spearman": float(stats.spearmanr(self._said, self._right).statistic),
        }
