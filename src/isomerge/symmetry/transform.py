"""A transform: one group element per space, and how it moves a tensor.

Along an axis `(head qk)` the outer space moves first (heads change places), then the inner one acts in the new place:
y[h] = g_h · x[order[h]]. So inner elements are indexed by where a unit *arrives*: the anchor's numbering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Atom, Layout, Segment


@dataclass(frozen=True)
class Transform:
    """Elements of the spaces that move; a space without an entry stays."""

    spaces: Mapping[str, Group]
    elements: Mapping[str, Tensor] = field(default_factory=dict)

    def moves(self, space: str) -> bool:
        return space in self.elements

    def act(self, tensor: Tensor, layout: Layout, *, skip: Iterable[str] = ()) -> Tensor:
        """Move a tensor by every space on its axes, except those in `skip`."""
        skip = frozenset(skip)
        for axis, segments in enumerate(layout.axes):
            touched = [s for s in segments if any(self._element(a, skip) is not None for a in s.atoms)]
            if not touched:
                continue
            if len(segments) == 1:
                moved = self.act_on_segment(segments[0].take(tensor, axis), segments[0], skip=skip)
                tensor = moved.reshape(tensor.movedim(axis, 0).shape).movedim(0, axis)
                continue
            result = tensor.clone()
            for segment in touched:
                segment.put(result, axis, self.act_on_segment(segment.take(tensor, axis), segment, skip=skip))
            tensor = result
        return tensor

    def act_on_segment(self, values: Tensor, segment: Segment, *, skip: frozenset[str] = frozenset()) -> Tensor:
        """Move a segment of shape (*sizes, rest)."""
        for position, atom in enumerate(segment.atoms):
            element = self._element(atom, skip)
            if element is None:
                continue
            group = self.spaces[atom.space]
            parents = [next(k for k, a in enumerate(segment.atoms[:position]) if a.space == p) for p in group.per]
            order = parents + [position] + [k for k in range(values.ndim) if k not in (*parents, position)]
            moved = values.permute(order)
            shape = moved.shape
            flat = moved.reshape(*shape[: len(parents) + 1], -1)
            flat = self._acted(element, flat, atom, segment)
            values = flat.reshape(shape).permute([order.index(k) for k in range(len(order))])
        return values

    def _acted(self, element: Tensor, x: Tensor, atom: Atom, segment: Segment) -> Tensor:
        """One element on x of shape (*parents, size, rest)."""
        return self.spaces[atom.space].act(element.to(x.device), x, dual=atom.dual, unsigned=atom.unsigned)

    def _element(self, atom: Atom, skip: frozenset[str]) -> Tensor | None:
        return None if atom.free or atom.space in skip else self.elements.get(atom.space)

    def element(self, space: str) -> Tensor:
        element = self.elements.get(space)
        return self.spaces[space].identity(batch_sizes(self.spaces, space)) if element is None else element

    def then(self, second: Transform) -> Transform:
        """The transform that does this one first and `second` after it."""
        elements = {}
        for space in sorted({*self.elements, *second.elements}):
            carried = second.carry(space, self.element(space))
            elements[space] = self.spaces[space].compose(second.element(space), carried)
        return Transform(self.spaces, elements)

    def inverse(self) -> Transform:
        """The transform that undoes this one."""
        back = Transform(
            self.spaces, {s: self.spaces[s].inverse(e) for s, e in self.elements.items() if not self.spaces[s].per}
        )
        elements = dict(back.elements)
        for space in sorted(self.elements, key=lambda s: len(self.spaces[s].per)):
            group = self.spaces[space]
            if group.per:
                elements[space] = Transform(self.spaces, elements).carry(space, group.inverse(self.elements[space]))
        return Transform(self.spaces, elements)

    def carry(self, space: str, element: Tensor) -> Tensor:
        """Reindex an element of a nested space by how this transform moves the units of its parents."""
        parents = self.spaces[space].per
        for depth, parent in enumerate(parents):
            order = self.spaces[parent].order(self.element(parent))
            if order is None or parent not in self.elements:
                continue
            # order has the sizes of the parent's own parents in front, which are the first axes of this element too.
            index = order.reshape(*order.shape, *[1] * (element.ndim - order.ndim))
            element = torch.take_along_dim(element, index.expand(*order.shape, *element.shape[order.ndim :]), dim=depth)
        return element

    def without_identities(self) -> Transform:
        """Only the spaces that move; elements laid out plainly, so that a stored transform acts to the same bit."""
        kept = {s: e.contiguous() for s, e in self.elements.items() if not self.spaces[s].is_identity(e)}
        return Transform(self.spaces, kept)

    def single(self) -> Transform:
        """The same in float32, for work that may be rough."""
        narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
        return Transform(self.spaces, {s: e.to(narrow.get(e.dtype, e.dtype)) for s, e in self.elements.items()})

    def only(self, spaces: Iterable[str]) -> Transform:
        wanted = set(spaces)
        return Transform(self.spaces, {s: e for s, e in self.elements.items() if s in wanted})


def batch_sizes(spaces: Mapping[str, Group], space: str) -> tuple[int, ...]:
    return tuple(spaces[parent].size for parent in spaces[space].per)


def random_transform(spaces: Mapping[str, Group], seed: int = 0, only: Iterable[str] | None = None) -> Transform:
    """A random element of every space (or of those in `only`), drawn in sorted order from one seed."""
    generator = torch.Generator().manual_seed(seed)
    wanted = sorted(spaces if only is None else only)
    return Transform(spaces, {s: spaces[s].random(batch_sizes(spaces, s), generator) for s in wanted})


def dimension(spaces: Mapping[str, Group], space: str) -> int:
    """Continuous dimension of a space: of one element, times the number of elements."""
    return spaces[space].dimension * math.prod(batch_sizes(spaces, space))
