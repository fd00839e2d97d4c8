"""Balance: bring both factors of an invertible space to equal Gram matrices, so that only a rotation is left to solve.

The balancing element is a group element, so it changes nothing; any scrambling of either model by invertible matrices,
rotary moduli or unit scales vanishes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isomerge.alignment import solvers
from isomerge.symmetry.groups import Group, Invertible, Rotary, Rotation, SignedScale
from isomerge.symmetry.patterns import Layout

Provider = Callable[[str], Tensor]


def is_balanced_by_scale(group: Group) -> bool:
    """Groups with a size to choose: everything that is neither discrete nor orthogonal."""
    if isinstance(group, Invertible):
        return not isinstance(group, Rotation)
    return isinstance(group, SignedScale) or (isinstance(group, Rotary) and group.scale)


def balancing_element(space: str, group: Group, tensors: Provider, layouts: Mapping[str, Layout]) -> tuple[Tensor, int]:
    """The element that balances one space, and how many of its parts had to be skipped (too badly conditioned)."""
    forward, dual = _factors(space, group, tensors, layouts)
    if not forward or not dual:  # one-sided: nothing to balance against
        batch = (forward or dual)[0].shape[:-2]
        return group.identity(batch), 0
    X, Y = torch.cat(forward, dim=-1), torch.cat(dual, dim=-1)
    if isinstance(group, Invertible):
        batch = X.shape[:-2]
        element, skipped = solvers.balance(X.reshape(-1, *X.shape[-2:]), Y.reshape(-1, *Y.shape[-2:]))
        return element.reshape(*batch, *element.shape[-2:]), int(skipped.sum())
    if isinstance(group, Rotary):
        squares = [group.pairs(z).abs().square().sum(-1) for z in (X, Y)]
        return solvers.balance_scale(*squares).to(torch.complex128), 0
    return solvers.balance_scale(X.square().sum(-1), Y.square().sum(-1)), 0


def _factors(
    space: str, group: Group, tensors: Provider, layouts: Mapping[str, Layout]
) -> tuple[list[Tensor], list[Tensor]]:
    """Everything that meets the space as g, and everything that meets it as g⁻ᵀ: (*parents, size, rest)."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, layout in layouts.items():
        if space not in layout.spaces():
            continue
        for axis, segments in enumerate(layout.axes):
            for segment in segments:
                place = next((k for k, a in enumerate(segment.atoms) if a.space == space), None)
                if place is None:
                    continue
                values = segment.take(tensors(name), axis)
                parents = [k for k in range(place) if segment.atoms[k].space in group.per]
                order = [*parents, place, *(k for k in range(values.ndim) if k not in (*parents, place))]
                moved = values.permute(order)
                sides[segment.atoms[place].dual].append(moved.reshape(*moved.shape[: len(parents) + 1], -1))
    return sides
