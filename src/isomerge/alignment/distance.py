"""Squared lengths and distances of large tensors in float64, without float64 copies of them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Numbers compared at once: as many as fit a processor's cache, or keep an accelerator busy."""


def squared(tensor: Tensor, other: Tensor | None = None) -> float:
    """‖tensor − other‖², or ‖tensor‖², in float64 and part by part.

    >>> squared(torch.tensor([3.0, 4.0])), squared(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
    (25.0, 4.0)
    """
    block = BLOCKS.get(tensor.device.type, BLOCKS["cuda"])
    parts = [each.flatten().split(block) for each in (tensor, other) if each is not None]
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for some in zip(*parts, strict=True):
        values = some[0].double() if other is None else some[0].double() - some[1].double()
        total += values @ values
    return float(total)
