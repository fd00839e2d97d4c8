"""A task turns outputs into predictions, and predictions with targets into a loss and a metric.

Classes, numbers, tags of words, and language; `isomerge.evaluation.task_choice` says which one a model is for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.results import Result

IGNORED = -100  # how stock models mark a position that has no target


ScoredRows = tuple[Tensor, Tensor | None]
"""The loss of each prediction of a batch, and whether it is right; None where it is no class."""


@dataclass
class TaskScore(Result):
    """What a model scored."""

    loss: float | None
    metric: float | None
    metric_name: str
    higher_is_better: bool
    metrics: dict[str, float]


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
        self.rows: list[ScoredRows] | None = None
        """What every prediction scored; kept where a list is put here before the pass."""

    @abstractmethod
    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions (log-probabilities, unless a task says otherwise) and their targets."""

    @abstractmethod
    def add(self, predictions: Tensor, targets: Tensor) -> None: ...

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of some predictions, with its gradient."""
        return F.nll_loss(predictions.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """All that is known of the predictions so far; `metric_name` is one of them."""

    def counts(self, labels: Tensor) -> Tensor:
        """How many predictions each example of a batch has."""
        return torch.ones(len(labels), dtype=torch.long)

    def combine(self, predictions: Sequence[Tensor]) -> Tensor:
        """What several models say together: the logarithm of their mean probability."""
        return torch.stack(list(predictions)).logsumexp(0) - math.log(len(predictions))

    def result(self) -> TaskScore:
        if not self.count:
            raise RequestError(f"Evaluating ({self.name}): the data holds nothing to predict. Use more of it.")
        metrics = self.metrics()
        loss, metric = self.loss_sum / self.count, metrics[self.metric_name]
        return TaskScore(loss, metric, self.metric_name, self.higher_is_better, metrics)

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
        if self.rows is not None:
            losses = F.nll_loss(predictions.double(), targets, reduction="none")
            self.rows.append((losses.cpu(), (predictions.argmax(-1) == targets).cpu()))


def logits_of(outputs: Mapping[str, Any]) -> Tensor:
    """The logits, whichever name the class gives them."""
    for name in ("logits", "prediction_logits"):
        logits: Tensor | None = outputs.get(name)
        if logits is not None:
            return logits
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


class _ClassCounts:
    """Per class: right, predicted, actual."""

    def __init__(self, classes: int) -> None:
        self.hits, self.predicted, self.actual = (torch.zeros(classes, dtype=torch.float64) for _ in range(3))

    def macro_f1(self) -> float:
        """The mean over the classes that occur, in the data or in the predictions."""
        scores = [
            f1(hits, predicted, actual)
            for hits, predicted, actual in zip(
                self.hits.tolist(), self.predicted.tolist(), self.actual.tolist(), strict=True
            )
            if predicted or actual
        ]
        return sum(scores) / len(scores) if scores else 0.0

    def micro_f1(self) -> float:
        return f1(float(self.hits.sum()), float(self.predicted.sum()), float(self.actual.sum()))


class ClassificationTask(Task):
    """Accuracy and macro-F1; the loss is the mean cross-entropy in nats."""

    metric_name = "accuracy"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._counts: _ClassCounts | None = None

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return as_log_probabilities(logits_of(outputs)), labels

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self._add_cross_entropy(predictions, targets)
        classes = predictions.shape[-1]
        counts = self._counts = self._counts or _ClassCounts(classes)
        predicted, right = predictions.argmax(-1).cpu(), targets.cpu()
        counts.hits += torch.bincount(right[predicted == right], minlength=classes)
        counts.predicted += torch.bincount(predicted, minlength=classes)
        counts.actual += torch.bincount(right, minlength=classes)

    def metrics(self) -> dict[str, float]:
        assert self._counts is not None
        return {"accuracy": float(self._counts.hits.sum()) / self.count, "macro_f1": self._counts.macro_f1()}


class MultiLabelTask(Task):
    """Each class applies or not. Predictions are probabilities; the loss is the mean binary cross-entropy."""

    name = "sequence"
    metric_name = "micro_f1"

    def __init__(self) -> None:
        super().__init__()
        self._counts: _ClassCounts | None = None
        self._exact = 0

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits_of(outputs).double().sigmoid(), labels.double()

    def combine(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy(predictions, targets)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self.broken += int(predictions.isnan().any(-1).sum())
        # cross_entropy refuses NaN, and `broken` counts such predictions.
        losses = F.binary_cross_entropy(predictions.nan_to_num(0.5), targets, reduction="none").mean(-1)
        self.loss_sum += float(losses.sum())
        self.count += len(targets)
        if self.rows is not None:
            self.rows.append((losses.cpu(), None))
        counts = self._counts = self._counts or _ClassCounts(predictions.shape[-1])
        predicted, right = predictions > 0.5, targets > 0.5
        counts.hits += (predicted & right).sum(0).cpu()
        counts.predicted += predicted.sum(0).cpu()
        counts.actual += right.sum(0).cpu()
        self._exact += int((predicted == right).all(-1).sum())

    def metrics(self) -> dict[str, float]:
        assert self._counts is not None
        return {
            "micro_f1": self._counts.micro_f1(),
            "macro_f1": self._counts.macro_f1(),
            "exact": self._exact / self.count,
        }


class RegressionTask(Task):
    """Pearson's and Spearman's correlation; the loss is the mean squared error. Predictions are the numbers."""

    name = "regression"
    metric_name = "pearson"

    def __init__(self) -> None:
        super().__init__()
        self._predicted: list[float] = []
        self._actual: list[float] = []

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        if logits.shape[-1] != 1:
            raise RequestError(
                f"Evaluating (regression): the model has {logits.shape[-1]} outputs, and a number to predict needs one."
            )
        return logits[..., 0].double(), labels.double()

    def combine(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(predictions, targets)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self.broken += int(predictions.isnan().sum())
        losses = (predictions - targets) ** 2
        self.loss_sum += float(losses.sum())
        self.count += len(targets)
        if self.rows is not None:
            self.rows.append((losses.double().cpu(), None))
        self._predicted += predictions.tolist()
        self._actual += targets.tolist()

    def metrics(self) -> dict[str, float]:
        from scipy import stats  # slow to import

        constant = len(set(self._predicted)) < 2 or len(set(self._actual)) < 2
        if constant or self.broken:
            return {"pearson": math.nan, "spearman": math.nan}
        return {
            "pearson": float(stats.pearsonr(self._predicted, self._actual).statistic),
            "spearman": float(stats.spearmanr(self._predicted, self._actual).statistic),
        }


Span = tuple[str, int, int]


def entities(tags: Sequence[str]) -> set[Span]:
    """(kind, first word, last word) of each entity, as the CoNLL evaluation reads tags.

    An entity begins at B- or S-, or where the kind changes, or after O; so files in which entities begin with I-
    are read too. Tags without a dash but O are entities of one kind each.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"]))
    [('LOC', 3, 3), ('LOC', 4, 4), ('PER', 0, 1)]
    """
    spans: set[Span] = set()
    start, kind, before = -1, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        name = name or "_"
        begins = mark in ("B", "S", "U") or (mark != "O" and (before in ("O", "E", "S", "L", "U") or name != kind))
        if start >= 0 and (mark == "O" or begins):
            spans.add((kind, start, place - 1))
            start = -1
        if begins:
            start = place
        kind, before = name, mark
    return spans


class TaggingTask(Task):
    """Entity-level micro-F1; the loss is the mean cross-entropy over words (their first tokens)."""

    name = "token"
    metric_name = "f1"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names
        self._hits = self._predicted = self._actual = self._right = 0

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        return as_log_probabilities(logits_of(outputs)), labels

    def counts(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED).sum(-1).cpu()

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        asked = targets != IGNORED
        self._add_cross_entropy(predictions[asked], targets[asked])
        likeliest = predictions.argmax(-1)
        self._right += int((likeliest[asked] == targets[asked]).sum())
        for row, right, there in zip(likeliest.cpu(), targets.cpu(), asked.cpu(), strict=True):
            actual = entities([self._names[n] for n in right[there].tolist()])
            predicted = entities([self._names[n] for n in row[there].tolist()])
            self._hits += len(actual & predicted)
            self._predicted += len(predicted)
            self._actual += len(actual)

    def metrics(self) -> dict[str, float]:
        return {
            "f1": f1(self._hits, self._predicted, self._actual),
            "precision": self._hits / self._predicted if self._predicted else 0.0,
            "recall": self._hits / self._actual if self._actual else 0.0,
            "accuracy": self._right / self.count,
        }


class LanguageTask(Task):
    """Perplexity, exp of the loss; the loss is the mean cross-entropy over the predicted tokens, in nats."""

    metric_name = "perplexity"
    higher_is_better = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._right = 0

    def predict(self, outputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        if self.name == "causal-lm":  # the token at each place is predicted from those before it
            logits, labels = logits[:, :-1], labels[:, 1:]
        asked = labels != IGNORED
        return as_log_probabilities(logits[asked]), labels[asked]

    def counts(self, labels: Tensor) -> Tensor:
        return ((labels[:, 1:] if self.name == "causal-lm" else labels) != IGNORED).sum(-1).cpu()

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self._add_cross_entropy(predictions, targets)
        self._right += int((predictions.argmax(-1) == targets).sum())

    def metrics(self) -> dict[str, float]:
        loss = self.loss_sum / self.count
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"perplexity": perplexity, "accuracy": self._right / self.count}
