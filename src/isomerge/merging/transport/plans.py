"""Transport plans of a whole model, and how they move a tensor.

    W ← T_out W T_inᵀ

For an axis that a weight writes to, every unit of the anchor becomes the mean of the source's units that were carried
to it: T is the plan P with rows brought to a sum of 1. For an axis that it reads from, every unit of the source hands
its weight on to the anchor's units it was carried to: T is P with columns brought to a sum of 1. So two equal units
that become one read what each read, and act as strongly as both did. Where P is a permutation, so is T both times, and
the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isomerge.merging.transport.solver import is_permutation
from isomerge.symmetry.architecture import RESIDUAL, Architecture
from isomerge.symmetry.patterns import Atom, Layout, Segment

Pair = tuple[int, int]
"""A unit of the anchor's parent space and one of the source's."""


@dataclass
class TransportPlans:
    """A plan for every space that moves; a space without one keeps its units. All sum to 1."""

    architecture: Architecture
    outer: dict[str, Tensor] = field(default_factory=dict)
    """Spaces that stand by themselves."""
    inner: dict[str, Mapping[Pair, Tensor]] = field(default_factory=dict)
    """Spaces inside another: one plan for each pair of outer units that mass flows between."""
    across: dict[str, Tensor] = field(default_factory=dict)
    """Spaces inside another, solved over all outer units at once: (outer × inner, outer × inner)."""

    def all(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.outer.items()
        yield from self.across.items()
        for space, by_pair in self.inner.items():
            for plan in by_pair.values():
                yield space, plan

    @property
    def exact(self) -> bool:
        """Only permutations of what may be permuted: the moved model computes what it did."""
        return not self.across and all(is_permutation(writing(plan)) for _, plan in self.all())

    def move(self, tensor: Tensor, source: Layout, anchor: Layout, *, leave: int | None = None) -> Tensor:
        """A tensor of the source in the units of the anchor; axis `leave` stays as it is."""
        reading = input_axes(anchor)
        for axis, pairs in enumerate(zip(source.axes, anchor.axes, strict=True)):
            pieces = [(b, a, self._matrix(b, a, axis in reading)) for b, a in zip(*pairs, strict=True)]
            if axis == leave or all(matrix is None for _, _, matrix in pieces):
                continue
            shape = [*tensor.shape]
            shape[axis] = anchor.shape[axis]
            result = tensor.new_zeros(shape)
            for b, a, matrix in pieces:
                values = b.take(tensor, axis).reshape(math.prod(b.sizes), -1)
                a.put(result, axis, values if matrix is None else _multiplied(matrix, values))
            tensor = result
        return tensor

    def _matrix(self, source: Segment, anchor: Segment, reading: bool) -> Tensor | None:
        """The map of one product of spaces, (anchor's units, source's units); None where they stay."""
        if not any(atom.space in self.outer for atom in anchor.atoms):
            return None  # before anything is built: a vocabulary squared would not fit into memory
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for first, last in self._runs(anchor.atoms):
            atoms, sizes = anchor.atoms[first:last], (anchor.sizes[first:last], source.sizes[first:last])
            if atoms[0].space in self.outer:
                piece = self._piece(atoms, sizes, reading)
            else:
                piece = torch.eye(math.prod(sizes[0]), dtype=torch.float64)
            matrix = torch.kron(matrix, piece)
        return matrix

    def _runs(self, atoms: tuple[Atom, ...]) -> Iterator[tuple[int, int]]:
        """A space that stands by itself, with those inside it that follow."""
        first = 0
        for k in range(1, len(atoms) + 1):
            inside = k < len(atoms) and not atoms[k].free and bool(self.architecture.spaces[atoms[k].space].per)
            if not inside:
                yield first, k
                first = k

    def _piece(self, atoms: tuple[Atom, ...], sizes: tuple[tuple[int, ...], tuple[int, ...]], reading: bool) -> Tensor:
        root, *nested = atoms
        for atom in nested:
            if atom.space in self.across:
                return (handing_on if reading or atom.dual else writing)(self.across[atom.space])
        outer = (handing_on if reading or root.dual else writing)(self.outer[root.space])
        if math.prod(sizes[0][1:]) == math.prod(sizes[1][1:]) == 1:
            return outer
        heights, widths = (math.prod(s[1:]) for s in sizes)
        result = torch.zeros(len(outer) * heights, outer.shape[1] * widths, dtype=torch.float64)
        for a, b in outer.nonzero().tolist():
            block = outer[a, b].reshape(1, 1)
            for atom, size in zip(nested, sizes[0][1:], strict=True):
                block = torch.kron(block, self._inside(atom, size, (a, b), reading))
            result[a * heights : (a + 1) * heights, b * widths : (b + 1) * widths] = block
        return result

    def _inside(self, atom: Atom, size: int, pair: Pair, reading: bool) -> Tensor:
        if atom.space not in self.inner:
            return torch.eye(size, dtype=torch.float64)
        return (handing_on if reading or atom.dual else writing)(self.inner[atom.space][pair])


def writing(plan: Tensor) -> Tensor:
    """Rows that sum to 1: each unit of the anchor is a mean of the source's."""
    total = plan.sum(1, keepdim=True)
    return torch.where(total > 0, plan / total, 0)


def softness(plan: Tensor) -> float:
    """How many units of the source an anchor's unit is made of, on average, less one: 0 for a permutation."""
    rows = writing(plan)
    return float((1 / rows.square().sum(1).clamp(min=1e-300)).mean()) - 1


def handing_on(plan: Tensor) -> Tensor:
    """Columns that sum to 1: each unit of the source is divided among the anchor's."""
    total = plan.sum(0, keepdim=True)
    return torch.where(total > 0, plan / total, 0)


def input_axes(layout: Layout) -> set[int]:
    """The axes of a weight that it reads from; the stream says which, as permutations have no dual to mark it."""
    if len(layout.axes) < 2:
        return set()
    atoms = [[atom for segment in axis for atom in segment.atoms if not atom.free] for axis in layout.axes]
    readers = {k for k, axis in enumerate(atoms) if any(a.space == RESIDUAL and a.dual for a in axis)}
    if readers:
        return readers
    writers = {k for k, axis in enumerate(atoms) if any(a.space == RESIDUAL for a in axis)}
    if writers:
        return {k for k, axis in enumerate(atoms) if axis and k not in writers}
    return {k for k, axis in enumerate(atoms) if any(a.dual for a in axis)}


def _multiplied(matrix: Tensor, values: Tensor) -> Tensor:
    if is_permutation(matrix):
        return values.index_select(0, matrix.argmax(1).to(values.device))
    return matrix.to(values) @ values
