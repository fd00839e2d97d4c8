"""A model made ready to be compared: canonical and balanced, tensor by tensor on demand.

Balancing brings both factors of an invertible space to equal Gram matrices, so that only a rotation is left to solve.
The balancing element is a group element, so it changes nothing; any scrambling of either model by invertible matrices,
rotary moduli or unit scales vanishes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.solvers.by_group import SOLVERS
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

Provider = Callable[[str], Tensor]


class PreparedModel:
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
        self._narrow: dict[str, Tensor] | None = {} if keep else None

    def __getstate__(self) -> dict[str, Any]:
        """In another process, tensors are read again: each solves few units, and many may share a machine's memory."""
        return {**self.__dict__, "_kept": None, "_narrow": None}

    def balance_spaces(self, spaces: Collection[str], run: Run) -> None:
        """Balance every space that has a size to choose; `run` maps a function over a list, perhaps in parallel."""
        groups = self.model.architecture.spaces
        wanted = sorted(s for s in spaces if groups[s].balanced)

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

    def single(self, name: str) -> Tensor:
        """The same in float32."""
        if self._narrow is None:
            return self.tensor(name).float()
        if name not in self._narrow:
            self._narrow[name] = self.tensor(name).float()
        return self._narrow[name]


def balancing_element(space: str, group: Group, tensors: Provider, layouts: Mapping[str, Layout]) -> tuple[Tensor, int]:
    """The element that balances one space, and how many of its parts had to be skipped (too badly conditioned)."""
    forward, dual = _factors(space, group, tensors, layouts)
    if not forward or not dual:  # one-sided: nothing to balance against
        batch = (forward or dual)[0].shape[:-2]
        return group.identity(batch), 0
    balance = SOLVERS[group.name].balance
    assert balance is not None, group.name
    return balance(group, torch.cat(forward, dim=-1), torch.cat(dual, dim=-1))


def _factors(
    space: str, group: Group, tensors: Provider, layouts: Mapping[str, Layout]
) -> tuple[list[Tensor], list[Tensor]]:
    """Everything that meets the space as g, and everything that meets it as g⁻ᵀ: (*parents, size, rest)."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, layout in layouts.items():
        for axis, segment in layout.segments_with(space):
            place = next(k for k, a in enumerate(segment.atoms) if a.space == space)
            values = segment.take(tensors(name), axis)
            parents = [k for k in range(place) if segment.atoms[k].space in group.per]
            order = [*parents, place, *(k for k in range(values.ndim) if k not in (*parents, place))]
            moved = values.permute(order)
            sides[segment.atoms[place].dual].append(moved.reshape(*moved.shape[: len(parents) + 1], -1))
    return sides
