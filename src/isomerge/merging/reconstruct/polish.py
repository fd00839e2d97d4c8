"""The last step, where it is asked for: the whole merged model, by gradient, towards what its parents say together.

The goal is the weighted mean of the parents' probabilities: no labels. Models without scores of classes or tokens are
drawn to the mean of what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.merging.reconstruct.assembly import sum_of
from isomerge.merging.reconstruct.descent import descend, put_back, spread
from isomerge.merging.reconstruct.running import Batch, Examples, Runner, rows_of

RATE = 0.003  # first step, relative to the size of a parameter


def polish(
    merged: Runner,
    parents: Sequence[Runner],
    weights: Sequence[float],
    examples: Examples,
    steps: int,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """What was done, and how far the merged model is from its parents' mean before and after; never farther."""
    parameters = [p for p in merged.model.parameters() if p.is_floating_point()]
    kept = [p.detach().cpu().clone() for p in parameters]

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            given = [_scores(parent.model, batch) for parent in parents]
        parts = []
        for field, own in _scores(merged.model, batch).items():
            valid = _valid(batch, own, merged.two_sided)
            theirs = [rows_of(scores[field], valid) for scores in given]
            parts.append(_distance(rows_of(own, valid), theirs, weights, _kind(merged.model, field, own)))
        return sum_of(parts)

    def mean_loss() -> float:
        with torch.no_grad():
            values = [float(loss(batch)) for batch in examples]
        return sum(values) / len(values)

    before = mean_loss()
    descend(parameters, loss, spread(examples, examples.count or 1, steps), steps, RATE, tell)
    after = mean_loss()
    if not after < before:
        put_back(parameters, kept)
        after = before
    return {"steps": steps, "loss_before": before, "loss_after": after}


def _scores(model: Any, batch: Batch) -> dict[str, Tensor]:
    """All scores a model gives (some have two heads), or its last hidden state."""
    output = model(**batch)
    found = {name: value for name, value in output.items() if name.endswith("logits") and isinstance(value, Tensor)}
    return found or {"hidden": output[0]}


def _kind(model: Any, field: str, scores: Tensor) -> str:
    """What scores are: of one class out of several, of several that may all hold, or plain numbers."""
    task = getattr(model.config, "problem_type", None)
    if field == "hidden" or task == "regression" or scores.shape[-1] == 1:
        return "numbers"
    return "many" if task == "multi_label_classification" else "one"


def _distance(own: Tensor, given: Sequence[Tensor], weights: Sequence[float], kind: str) -> Tensor:
    def mean(parts: Sequence[Tensor]) -> Tensor:
        return sum_of(part * weight for part, weight in zip(parts, weights, strict=True))

    if kind == "one":
        return F.kl_div(F.log_softmax(own, -1), mean([g.softmax(-1) for g in given]), reduction="batchmean")
    if kind == "many":
        return F.binary_cross_entropy_with_logits(own, mean([g.sigmoid() for g in given]))
    return F.mse_loss(own, mean(given))


def _valid(batch: Batch, scores: Tensor, two_sided: bool) -> Tensor | None:
    mask = batch.get("decoder_attention_mask" if two_sided else "attention_mask")
    return mask.reshape(-1).bool() if mask is not None and mask.numel() == scores[..., 0].numel() else None
