"""One class of several, of an image or a text; or several classes at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.evaluation.tasks.base import Task, as_log_probabilities, f1, logits_of


class _Counts:
    """Per class: right, predicted, actual."""

    def __init__(self, classes: int) -> None:
        self.hits, self.predicted, self.actual = (torch.zeros(classes, dtype=torch.float64) for _ in range(3))

    def macro_f1(self) -> float:
        """The mean over the classes that occur, in the data or in the predictions."""
        found = [
            f1(hits, predicted, actual)
            for hits, predicted, actual in zip(
                self.hits.tolist(), self.predicted.tolist(), self.actual.tolist(), strict=True
            )
            if predicted or actual
        ]
        return sum(found) / len(found) if found else 0.0

    def micro_f1(self) -> float:
        return f1(float(self.hits.sum()), float(self.predicted.sum()), float(self.actual.sum()))


class Classification(Task):
    """Accuracy and macro-F1; the loss is the mean cross-entropy in nats."""

    metric_name = "accuracy"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._counts: _Counts | None = None

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return as_log_probabilities(logits_of(outputs)), labels

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self._add_cross_entropy(predictions, targets)
        classes = predictions.shape[-1]
        counts = self._counts = self._counts or _Counts(classes)
        said, right = predictions.argmax(-1).cpu(), targets.cpu()
        counts.hits += torch.bincount(right[said == right], minlength=classes)
        counts.predicted += torch.bincount(said, minlength=classes)
        counts.actual += torch.bincount(right, minlength=classes)

    def metrics(self) -> dict[str, float]:
        assert self._counts is not None
        return {"accuracy": float(self._counts.hits.sum()) / self.count, "macro_f1": self._counts.macro_f1()}


class SeveralClasses(Task):
    """Each class applies or not. Predictions are probabilities; the loss is the mean binary cross-entropy."""

    name = "sequence"
    metric_name = "micro_f1"

    def __init__(self) -> None:
        super().__init__()
        self._counts: _Counts | None = None
        self._exact = 0

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits_of(outputs).double().sigmoid(), labels.double()

    def together(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self.broken += int(predictions.isnan().any(-1).sum())
        # cross_entropy refuses NaN, and a broken model is told about by `broken`.
        self.loss_sum += float(
            F.binary_cross_entropy(predictions.nan_to_num(0.5), targets, reduction="none").mean(-1).sum()
        )
        self.count += len(targets)
        counts = self._counts = self._counts or _Counts(predictions.shape[-1])
        said, right = predictions > 0.5, targets > 0.5
        counts.hits += (said & right).sum(0).cpu()
        counts.predicted += said.sum(0).cpu()
        counts.actual += right.sum(0).cpu()
        self._exact += int((said == right).all(-1).sum())

    def metrics(self) -> dict[str, float]:
        assert self._counts is not None
        return {
            "micro_f1": self._counts.micro_f1(),
            "macro_f1": self._counts.macro_f1(),
            "exact": self._exact / self.count,
        }
