"""The weights of a model in training: read as a copy, put back in place, averaged, written at the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.checkpoint.memory import unwrapped

Weights = dict[str, Tensor]


def weights_of(model: nn.Module) -> Weights:
    """A copy of every fractional tensor, on the CPU in at least float32; tensors that are tied come once."""
    found: Weights = {}
    seen = set()
    for name, tensor in unwrapped(model).state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            wide = torch.promote_types(tensor.dtype, torch.float32)
            found[name] = tensor.detach().to("cpu", wide, copy=True)
    return found


@torch.no_grad()
def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the model that they were read from, in its own dtypes and where it is."""
    own = unwrapped(model).state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)


class RunningMean:
    """The mean of weights that come one after the other; one copy is in memory."""

    def __init__(self) -> None:
        self.count = 0
        self.weights: Weights = {}

    def add(self, weights: Mapping[str, Tensor], count: int = 1) -> None:
        """Weights, or the mean of `count` of them."""
        self.count += count
        if not self.weights:
            self.weights = {name: tensor.clone() for name, tensor in weights.items()}
            return
        for name, mean in self.weights.items():
            mean.lerp_(weights[name], count / self.count)


def write_model(model: nn.Module, weights: Mapping[str, Tensor], folder: str | Path, *, load: bool) -> None:
    """Save a copy of the model with these weights, as its class saves it; `load` puts them into the model, too."""
    result: Any = copy.deepcopy(unwrapped(model)).cpu()
    put_weights(result, weights)
    result.save_pretrained(Path(folder))
    if load:
        put_weights(model, weights)
