"""What learned coefficients make low: the loss of labels, the entropy of predictions, or the distance to those of the
models themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.data.base import Batch, Data
from isomerge.errors import RequestError
from isomerge.evaluation.measure import labels_of
from isomerge.evaluation.task_choice import choose_task, require_fitting, task_name
from isomerge.evaluation.tasks import Task
from isomerge.merging.layerwise.assembly import sum_of
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.learned_coefficients import ModelSpan
from isomerge.merging.merge_inputs import MergeInputs
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import distance, rows_of, scores_in


@dataclass(frozen=True)
class LabelLoss:
    """(1 − p) L(x) + p L(x + δ): the loss of the labels, on the inputs and on the worst ones within the radius."""

    task: Task
    data: Data
    perturbed: float = 0.0
    radius: float = 0.0
    attack: int = 1
    """Gradient steps that look for δ."""

    @classmethod
    def of(cls, inputs: MergeInputs, config: Mapping[str, Any], *perturbations: Any) -> LabelLoss:
        """On the task of models with this config, and the method's data."""
        (data,), model = inputs.data, inputs.models[0].name
        name = task_name(config, None, model)
        require_fitting(data.data, name, model)
        return cls(choose_task(config, name)(), data.data, *perturbations)

    def __call__(self, span: ModelSpan, weights: State, batch: Batch, shares: Sequence[float]) -> Tensor:
        parts = []
        if self.perturbed < 1:
            parts.append((1 - self.perturbed) * self.loss(span, weights, batch))
        if self.perturbed > 0:
            worse = self.perturb(span, {name: tensor.detach() for name, tensor in weights.items()}, batch)
            parts.append(self.perturbed * self.loss(span, weights, worse))
        return sum_of(parts)

    def loss(self, span: ModelSpan, weights: State, batch: Batch) -> Tensor:
        return self.task.loss(*self.task.predict(span.run(weights, batch), labels_of(batch, self.data)))

    @torch.enable_grad()
    def perturb(self, span: ModelSpan, weights: State, batch: Batch) -> Batch:
        """The batch with inputs moved against the model: steps along the sign of the gradient, within the radius."""
        name = next((name for name, tensor in batch.items() if tensor.is_floating_point() and name != "labels"), None)
        if name is None:
            raise RequestError(
                f"Perturbing {', '.join(batch)}: tokens have no neighbours to move to. Set perturbed to 0, or use "
                "models of images.",
                keys=("perturbed",),
            )
        moved = torch.zeros_like(batch[name])
        step = self.radius if self.attack == 1 else 2.5 * self.radius / self.attack
        for _ in range(self.attack):
            moved.requires_grad_(True)
            loss = self.loss(span, weights, {**batch, name: batch[name] + moved})
            (slope,) = torch.autograd.grad(loss, moved)
            moved = (moved.detach() + step * slope.sign()).clamp(-self.radius, self.radius)
        return {**batch, name: batch[name] + moved}


def entropy(span: ModelSpan, weights: State, batch: Batch, shares: Sequence[float]) -> Tensor:
    """−Σ p log p of the predictions: the mean over examples, or over tokens."""
    padding, parts = PaddingMask(batch, span.module), []
    task = getattr(span.module.config, "problem_type", None)
    for field, own in scores_in(span.run(weights, batch)).items():
        if field == "hidden" or task == "regression" or own.shape[-1] == 1:
            raise RequestError(
                "The entropy of predictions needs models that score classes or tokens. Set objective to predictions.",
                keys=("objective",),
            )
        scores = rows_of(own, padding.of_side(own[..., 0].numel(), encoder=False))
        if task == "multi_label_classification":
            parts.append(-sum_of([s.sigmoid() * F.logsigmoid(s) for s in (scores, -scores)]).mean())
        else:
            parts.append(-(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean())
    return sum_of(parts)


def prediction_distance(span: ModelSpan, weights: State, batch: Batch, shares: Sequence[float]) -> Tensor:
    """KL(p_k ‖ p) to the predictions of the model whose data this is, or to the mean of several."""
    heard = [(number, share) for number, share in enumerate(shares) if share > 0]
    with torch.no_grad():
        given = [scores_in(span.run(span.parent(number), batch)) for number, _ in heard]
    padding, parts = PaddingMask(batch, span.module), []
    for field, own in scores_in(span.run(weights, batch)).items():
        valid = padding.of_side(own[..., 0].numel(), encoder=False)
        theirs = [rows_of(scores[field], valid) for scores in given]
        parts.append(distance(span.module, field, rows_of(own, valid), theirs, [share for _, share in heard]))
    return sum_of(parts)
