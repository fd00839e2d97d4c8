"""Other weights in a module that is already there: mixtures of models, or one merged model after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.running.stock import load_stock


@dataclass
class Mixture:
    """One module, and the weights of several models under its names."""

    module: Any
    weights: list[dict[str, Tensor]]
    config: dict[str, Any] = field(default_factory=dict)
    """The config.json of the models in it; empty for other modules."""

    @torch.no_grad()
    def put(self, shares: Sequence[float]) -> Any:
        """Put Σ share × weights into the module, and give it back. A share of 1 gives that model bit by bit."""
        own = self.module.state_dict()
        for name in self.weights[0]:
            target = own[name]
            first = True
            for share, weights in zip(shares, self.weights, strict=True):
                if share == 0:
                    continue
                if first:
                    target.copy_(weights[name]).mul_(share)
                else:
                    target.add_(weights[name], alpha=share)
                first = False
        return self.module

    def corner(self, number: int) -> Any:
        """Put one of the models into the module."""
        return self.put([float(k == number) for k in range(len(self.weights))])

    def inner(self, first: int, second: int) -> float:
        """⟨W_first − W_0, W_second − W_0⟩ over all weights, each stored tensor once."""
        total = 0.0
        seen = set()
        for name, origin in self.weights[0].items():
            if origin.data_ptr() in seen:
                continue
            seen.add(origin.data_ptr())
            a, b = (self.weights[k][name].double() - origin.double() for k in (first, second))
            total += float((a * b).sum())
        return total


class ReusedModule:
    """A stock module that takes the weights of one model after the other.

    Where the class names its weights as the files do, tensors are copied in place one at a time, so that memory is one
    model; otherwise the class loads them again through its own renaming.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._module: Any = None
        self._structure: Any = None
        self._same_names = False

    def put(
        self, config: Mapping[str, Any], structure: Any, dtype: torch.dtype, weights: Iterable[tuple[str, Tensor]]
    ) -> Any:
        """The module with these weights; `structure` is equal for models that fit into the same module."""
        if self.copies(structure):
            self._copy(weights)
        else:
            self._module = self._structure = None  # the old one goes before the new one comes
            state = dict(weights)
            self._module = load_stock(config, state, dtype=dtype).to(self._device)
            self._same_names = _holds_as_stored(self._module.state_dict(), state)
            self._structure = structure
        return self._module.eval()  # whoever used it last may have left it in training

    def copies(self, structure: Any) -> bool:
        """Whether the next model is copied into the module that is there, and none is loaded."""
        return self._same_names and bool(self._structure == structure)

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._module.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)


def _holds_as_stored(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Whether the module holds every tensor as it is stored, and nothing that does not follow from them.

    Two that share their place do so only as long as they are equal, which those of the next model may not be."""
    there = all(
        name in own and own[name].shape == tensor.shape and torch.equal(own[name].cpu(), tensor.to(own[name].dtype))
        for name, tensor in state.items()
    )
    if not there:
        return False
    places = {own[name].data_ptr() for name in state}
    return len(places) == len(state) and all(tensor.data_ptr() in places for tensor in own.values())
