"""Language modelling: the next token, a hidden token, or the answer of an encoder-decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isomerge.evaluation.tasks.base import IGNORED, Task, as_log_probabilities, logits_of


class Language(Task):
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

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        self._add_cross_entropy(predictions, targets)
        self._right += int((predictions.argmax(-1) == targets).sum())

    def metrics(self) -> dict[str, float]:
        loss = self.loss_sum / self.count
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"perplexity": perplexity, "accuracy": self._right / self.count}
