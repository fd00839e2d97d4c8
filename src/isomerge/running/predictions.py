"""What models predict, and how far one prediction is from the mean of others. No labels are needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def scores_in(output: Any) -> dict[str, Tensor]:
    """All scores a model gives (some have two heads), or its last hidden state."""
    scores = {name: value for name, value in output.items() if name.endswith("logits") and isinstance(value, Tensor)}
    return scores or {"hidden": output[0]}


def rows_of(tensor: Tensor, valid: Tensor | None) -> Tensor:
    """(rows, width), without padding."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if valid is None else flat[valid]


def distance(model: Any, field: str, own: Tensor, given: Sequence[Tensor], shares: Sequence[float] | Tensor) -> Tensor:
    """From rows of scores to the mean of other models' predictions, each by its share (one, or one for each row): the
    divergence KL(mean ‖ own) of classes or tokens, the cross-entropy of labels that may all hold, the squared distance
    of plain numbers."""
    kind, mean = _kind(model, field, own), mean_prediction(model, field, given, shares)
    if kind == "numbers":
        return F.mse_loss(own, mean)
    if kind == "labels":
        return F.binary_cross_entropy_with_logits(own, mean)
    return F.kl_div(F.log_softmax(own, -1), mean, reduction="batchmean")


def mean_prediction(model: Any, field: str, given: Sequence[Tensor], shares: Sequence[float] | Tensor) -> Tensor:
    """Of rows of scores of several models: the mean of their probabilities, or of their numbers."""
    kind = _kind(model, field, given[0])
    parts = given if kind == "numbers" else [g.sigmoid() if kind == "labels" else g.softmax(-1) for g in given]
    total: Tensor = reduce(torch.add, (part * share for part, share in zip(parts, shares, strict=True)))
    return total


def as_scores(model: Any, field: str, mean: Tensor) -> Tensor:
    """Scores of a model that would predict this."""
    kind = _kind(model, field, mean)
    return mean if kind == "numbers" else mean.logit() if kind == "labels" else mean.log()


def _kind(model: Any, field: str, own: Tensor) -> str:
    task = getattr(model.config, "problem_type", None)
    if field == "hidden" or task == "regression" or own.shape[-1] == 1:
        return "numbers"
    return "labels" if task == "multi_label_classification" else "one of several"
