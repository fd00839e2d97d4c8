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

from isomerge.merge.reconstruct.assembly import sum_of
from isomerge.merge.reconstruct.descent import again, descend
from isomerge.merge.reconstruct.running import Batch, Examples, Runner, rows_of

RATE = 0.003


def polish(
    merged: Runner,
    parents: Sequence[Runner],
    weights: Sequence[float],
    examples: Examples,
    steps: int,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """What was done, and how far the merged model is from its parents' mean before and after."""
    parameters = [p for p in merged.model.parameters() if p.is_floating_point()]

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            given = [_scores(parent.model, batch) for parent in parents]
        own = _scores(merged.model, batch)
        valid = _valid(batch, own, merged.two_sided)
        own = rows_of(own, valid)
        if _has_classes(merged.model):
            goal = sum_of(w * rows_of(g, valid).float().softmax(-1) for g, w in zip(given, weights, strict=True))
            return F.kl_div(F.log_softmax(own.float(), -1), goal, reduction="batchmean")
        goal = sum_of(w * rows_of(g, valid) for g, w in zip(given, weights, strict=True))
        return F.mse_loss(own, goal) / goal.var()

    def mean_loss() -> float:
        with torch.no_grad():
            values = [float(loss(batch)) for batch in examples]
        return sum(values) / len(values)

    before = mean_loss()
    descend(parameters, loss, again(examples), steps, RATE, tell)
    return {"steps": steps, "loss_before": before, "loss_after": mean_loss()}


def _scores(model: Any, batch: Batch) -> Tensor:
    output = model(**batch)
    found = getattr(output, "logits", None)
    return found if found is not None else output[0]


def _has_classes(model: Any) -> bool:
    return getattr(model.config, "problem_type", None) != "regression" and getattr(model.config, "num_labels", 2) > 1


def _valid(batch: Batch, scores: Tensor, two_sided: bool) -> Tensor | None:
    mask = batch.get("decoder_attention_mask" if two_sided else "attention_mask")
    return mask.reshape(-1).bool() if mask is not None and mask.numel() == scores[..., 0].numel() else None
