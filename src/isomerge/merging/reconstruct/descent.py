"""A few steps of Adam, deterministic, with a step size relative to the size of each parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

WARM_UP = 20
T = TypeVar("T")


def descend(
    parameters: Sequence[Tensor],
    loss: Callable[[T], Tensor],
    batches: Iterator[T],
    steps: int,
    rate: float,
    tell: Callable[[int], None] | None = None,
) -> None:
    """Lower `loss(batch)` by `steps` steps. `rate` is the first step, relative to a parameter's rms."""
    sizes = [float(p.detach().float().square().mean().sqrt()) for p in parameters]
    typical = sorted(sizes)[len(sizes) // 2] or 1.0
    groups = [{"params": [p], "first": rate * (size or typical)} for p, size in zip(parameters, sizes, strict=True)]
    optimiser = torch.optim.Adam(groups, lr=rate)
    for parameter in parameters:
        parameter.requires_grad_(True)
    for step in range(steps):
        share = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / WARM_UP)
        for group in optimiser.param_groups:
            group["lr"] = group["first"] * share
        with torch.enable_grad():
            value = loss(next(batches))
            optimiser.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if tell:
            tell(step + 1)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def shuffled(items: Sequence[T]) -> Iterator[T]:
    """Over and over, each time in another order; always the same orders."""
    draw = torch.Generator().manual_seed(0)
    while True:
        for place in torch.randperm(len(items), generator=draw).tolist():
            yield items[place]


def spread(items: Iterable[T], count: int, steps: int) -> Iterator[T]:
    """`steps` of `count` items that can only be passed over in order: evenly over them, again and again if need be."""
    every = max(1, count // steps)
    while True:
        yield from itertools.islice(items, 0, None, every)


def put_back(parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
