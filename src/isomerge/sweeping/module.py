"""The one module that every point is measured in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.connectivity.ends import Ends
from isomerge.errors import CheckpointError
from isomerge.evaluation.probe import load_stock
from isomerge.evaluation.tasks.model import require_runnable
from isomerge.merging.outcome.merged import Merged
from isomerge.merging.run.memory import fitting_threads


@dataclass
class Placed(Ends):
    """A module that already holds the weights to be measured."""

    def mix(self, shares: Any) -> Any:
        return self.module


class NotFinite(CheckpointError):
    """Merged weights that are no numbers, or too large for their dtype: an answer about a point, as NaN is."""


class Seat:
    """Puts merged weights into a stock module, rounded as they would be written.

    Where the class names its weights as the files do, tensors are copied in place one at a time, so that memory is one
    model; otherwise the class loads them again through its own renaming.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._module: Any = None
        self._made_for: Any = None
        self._straight = False

    def place(self, merged: Merged) -> Placed:
        merged.threads = fitting_threads(merged.jobs, merged.threads, merged.max_memory)
        made_for = (merged.config, merged.plan)
        if self._straight and made_for == self._made_for:
            self._copy(merged)
        else:
            self._load(merged)
            self._made_for = made_for
        return Placed(self._module.eval(), [])  # whoever measured the last point may have left it in training

    @torch.no_grad()
    def _copy(self, merged: Merged) -> None:
        own = self._module.state_dict()
        for name, tensor in _weights(merged):
            own[name].copy_(tensor)

    def _load(self, merged: Merged) -> None:
        self._module = self._made_for = None  # the old one goes before the new one comes
        require_runnable(merged.donor)
        state = dict(_weights(merged))
        wide = any(info.dtype == torch.float64 for info in merged.plan.values())
        dtype = torch.float64 if wide else torch.float32  # as isomerge eval runs what is written
        self._module = load_stock(merged.config, state, dtype=dtype).to(self._device)
        self._straight = _same_names(self._module.state_dict(), state)


def _weights(merged: Merged) -> Iterator[tuple[str, Tensor]]:
    """As they would be written; trouble while merging is told apart from trouble with the class."""
    try:
        yield from merged.tensors()
    except CheckpointError as error:
        raise NotFinite(*error.args) from error


def _same_names(own: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    """Whether the module holds every tensor as it is stored, and nothing that does not follow from them.

    Two that share their place do so only as long as they are equal, which the next point may not be."""
    there = all(
        name in own and own[name].shape == tensor.shape and torch.equal(own[name].cpu(), tensor.to(own[name].dtype))
        for name, tensor in state.items()
    )
    if not there:
        return False
    places = {own[name].data_ptr() for name in state}
    return len(places) == len(state) and all(tensor.data_ptr() in places for tensor in own.values())
