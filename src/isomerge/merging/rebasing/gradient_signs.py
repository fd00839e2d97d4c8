"""A carried change, kept only where the new base would have to go that way itself.

    τ'_i ← τ'_i · 1[τ'_i · g_i < 0],   g = ∇ KL(fine-tune's predictions ‖ new base's) at the new base

Rinaldi et al. 2025 (arXiv 2510.09658) take the gradient of a few labelled examples; the predictions of the fine-tune
stand for the labels here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.merging.layerwise.roles import as_saved, file_names
from isomerge.merging.rebasing.moved_change import MovedChange
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import distance, rows_of, scores_in
from isomerge.running.stock import StockModel, run_module


def agreeing(gradients: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Sets to zero what goes up the gradient, and what has none.

    >>> agreeing({"w": torch.tensor([1.0, -1.0, 0.0])})("w", torch.tensor([2.0, 2.0, 2.0])).tolist()
    [0.0, 2.0, 0.0]
    """

    def mask(file: str, change: Tensor) -> Tensor:
        gradient = gradients.get(file)
        return change if gradient is None else change * (change * gradient.to(change) < 0)

    return mask


def prediction_gradients(change: MovedChange, data: DataPass, device: str) -> dict[str, Tensor]:
    """Of how far the new base is from the fine-tune's predictions, by the names of the result's tensors."""
    onto = StockModel.load(change.aligned.as_checkpoint(change.onto), device).module
    tuned = StockModel.load(change.tuned, device).module
    for parameter in onto.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for batch in data:
        with torch.no_grad():
            wanted = scores_in(run_module(tuned, batch))
        with torch.enable_grad():
            own = scores_in(run_module(onto, batch))
            total = sum((_distance(onto, field, own[field], wanted[field], batch) for field in own), torch.zeros(()))
            torch.autograd.backward(total)
    state = {n: p.grad.detach().cpu() for n, p in onto.named_parameters() if p.grad is not None}
    renamed = file_names(change.aligned.own.model)
    return {renamed.get(name, name): gradient for name, gradient in as_saved(onto, state).items()}


def _distance(model: object, field: str, own: Tensor, wanted: Tensor, batch: Batch) -> Tensor:
    valid = PaddingMask(batch, model).of_side(own[..., 0].numel(), encoder=False) if own.dim() > 2 else None
    return distance(model, field, rows_of(own, valid), [rows_of(wanted, valid)], [1.0]).cpu()
