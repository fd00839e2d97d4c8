"""The router: a linear posterior of the models, from the evidence in the stream."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.mixture.native import MixtureShape
from isomerge.running.call_recorder import ForwardDone
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import rows_of

STEPS = 80
PULL = 1e-4


def find_router(model: Any, data: GoalData, shape: MixtureShape) -> tuple[Tensor, float]:
    """(experts, hidden) for a mixture that has none yet, and the share of tokens it sends to whom is believed most."""
    read = slice(shape.streams, shape.constant + 1)
    rows, goals = [], []
    for number, batch in enumerate(data.examples):
        count = batch["input_ids"].numel()
        valid = PaddingMask(batch, model).of_side(count, encoder=False)
        rows.append(rows_of(_first_router_input(model, batch), valid)[:, read])
        believed = data.believed(number, count, valid)
        assert believed is not None
        goals.append(believed)
    inputs, goal = torch.cat(rows).double(), torch.cat(goals, 1).double()
    found = fit_posterior(inputs, goal)
    router = found.new_zeros(shape.models, shape.hidden)
    router[:, read] = found
    right = (inputs @ found.T).argmax(1) == goal.argmax(0)
    return router.cpu(), float(right.double().mean())


@torch.no_grad()
def _first_router_input(model: Any, batch: Batch) -> Tensor:
    """What the router of the first layer reads; nothing behind it is run."""
    seen: list[Tensor] = []

    def hook(*call: Any) -> None:
        seen.append(call[-1])
        raise ForwardDone

    norm = model.get_submodule("model.layers.0.post_attention_layernorm")
    with norm.register_forward_hook(hook), contextlib.suppress(ForwardDone):
        model(**batch)
    return seen[0]


def fit_posterior(inputs: Tensor, believed: Tensor) -> Tensor:
    """(experts, in): min over R of the mean cross-entropy of softmax(R x) against who is believed (experts, rows), and
    a small pull to zero, by L-BFGS. R x is the logarithm of the posterior, up to what all experts share."""
    size = inputs.square().mean(0).sqrt()
    size = torch.where(size > 0, size, torch.ones_like(size))
    scaled, goal = inputs / size, believed.T
    weight = torch.zeros(goal.shape[1], inputs.shape[1], dtype=inputs.dtype, device=inputs.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        with torch.enable_grad():
            loss = -(goal * (scaled @ weight.T).log_softmax(-1)).sum(-1).mean() + PULL * weight.square().sum()
            loss.backward()
        return loss.detach()

    optimiser.step(closure)
    return weight.detach() / size
