"""Steps of Adam whose sizes are relative to what they change, with a warm-up and a rate that falls as a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isomerge.running.kept_steps import KeptSteps

WARM_UP = 20
T = TypeVar("T")


def descend(
    parameters: Sequence[Tensor],
    loss: Callable[[T], Tensor],
    batches: Iterator[T],
    steps: int,
    rate: float,
    report: Callable[[int], None] | None = None,
    kept: KeptSteps | None = None,
    sizes: Sequence[float] | None = None,
) -> None:
    """Lower `loss(batch)` by `steps` steps. `rate` is the first step, relative to `sizes`, by default each rms.
    What `kept` has of these steps is not done again."""
    sizes = sizes or [float(p.detach().float().square().mean().sqrt()) for p in parameters]
    typical = sorted(sizes)[len(sizes) // 2] or 1.0
    groups = [{"params": [p], "first": rate * (size or typical)} for p, size in zip(parameters, sizes, strict=True)]
    optimiser = torch.optim.Adam(groups, lr=rate)
    for parameter in parameters:
        parameter.requires_grad_(True)
    done = kept.restore(parameters, optimiser) if kept else 0
    for step in range(steps):
        if step < done:
            next(batches)
            continue
        share = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / WARM_UP)
        for group in optimiser.param_groups:
            group["lr"] = group["first"] * share
        with torch.enable_grad():
            value = loss(next(batches))
            optimiser.zero_grad(set_to_none=True)
            value.backward()
        optimiser.step()
        if kept:
            kept.store(step + 1, parameters, optimiser)
        if report:
            report(step + 1)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
