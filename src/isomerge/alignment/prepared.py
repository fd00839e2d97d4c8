"""A model made ready to be compared: canonical and balanced, tensor by tensor on demand."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from isomerge.alignment.balancing import balancing_element, is_balanced_by_scale
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run


class Prepared:
    """`tensor(name)` is the canonical, balanced tensor in float64. With `keep`, tensors stay in memory between sweeps.

    Without gauges (levels `permutation` and `rotation`) it is the tensor as stored, in its own precision: evidence is a
    sum over it, and what is solved from that sum, or applied, is float64 again.
    """

    def __init__(
        self, model: BoundModel, moving: Collection[str], *, gauges: bool, precision: torch.dtype, keep: bool = False
    ) -> None:
        self.model = model
        self.canonical = Canonical(model, moving, gauges=gauges)
        self.balance = Transform(model.architecture.spaces)
        self.skipped: dict[str, int] = {}
        self._raw = not gauges
        self._precision = precision
        self._kept: dict[str, Tensor] | None = {} if keep else None

    def balance_spaces(self, spaces: Collection[str], run: Run) -> None:
        """Balance every space that has a size to choose; `run` maps a function over a list, perhaps in parallel."""
        groups = self.model.architecture.spaces
        wanted = sorted(s for s in spaces if is_balanced_by_scale(groups[s]))

        def one(space: str) -> tuple[Tensor, int]:
            return balancing_element(space, groups[space], self.canonical.tensor, self.model.layouts)

        elements = {}
        for space, (element, skipped) in zip(wanted, run(one, wanted), strict=True):
            elements[space] = element.cpu()  # elements live on the CPU; they are small and move to where they act
            if skipped:
                self.skipped[space] = skipped
        self.balance = Transform(groups, elements)

    def tensor(self, name: str) -> Tensor:
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        if self._raw:
            tensor = self.model.raw(name, self._precision)
        else:
            tensor = self.balance.act(self.canonical.tensor(name), self.model.layouts[name])
        if self._kept is not None:
            self._kept[name] = tensor
        return tensor
