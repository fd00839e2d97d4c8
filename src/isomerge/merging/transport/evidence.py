"""What says how far two units are apart: their activations on the same inputs, or the weights they read with.

    C_ij = ‖x_i − y_j‖²

with x_i all activations of unit i of the anchor, and y_j those of unit j of the source; or with their incoming weights
and biases, the source's seen through the maps of the units they come from.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isomerge.calibration.cross import CrossMoments
from isomerge.calibration.sites import Site
from isomerge.merging.transport.plans import TransportPlans, input_axes
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Segment


@dataclass(frozen=True)
class UnitDistances:
    """Squared distances between the units of one place: axes are its spaces, the anchor's first, then the source's."""

    label: str
    spaces: tuple[str, ...]
    cost: Tensor
    energy_a: Tensor
    """Squared size of each unit's features."""
    energy_b: Tensor

    @classmethod
    def of(
        cls, label: str, spaces: Sequence[str], sizes: tuple[Sequence[int], Sequence[int]], cross: Tensor,
        energy_a: Tensor, energy_b: Tensor,
    ) -> UnitDistances:  # fmt: skip
        cost = (energy_a[:, None] + energy_b - 2 * cross).clamp(min=0)
        shaped = cost.reshape(*sizes[0], *sizes[1])
        return cls(label, tuple(spaces), shaped, energy_a.reshape(*sizes[0]), energy_b.reshape(*sizes[1]))

    @property
    def size(self) -> float:
        """The norm of everything that is seen here, of both models alike."""
        return float((self.energy_a.sum() * self.energy_b.sum()) ** 0.25)

    def normalised(self) -> UnitDistances:
        """Of size 1, so that every place counts the same."""
        scale = self.size**2
        if not scale > 0:
            return self
        return replace(
            self, cost=self.cost / scale, energy_a=self.energy_a / scale, energy_b=self.energy_b / scale
        )  # fmt: skip

    def without(self, fixed: set[str]) -> UnitDistances:
        """Spaces whose units keep their place are not looked at unit by unit: only i with i counts."""
        reduced = self
        for space in [s for s in self.spaces if s in fixed]:
            k, n = reduced.spaces.index(space), len(reduced.spaces)
            reduced = UnitDistances(
                reduced.label, tuple(s for s in reduced.spaces if s != space),
                reduced.cost.diagonal(dim1=k, dim2=n + k).sum(-1), reduced.energy_a.sum(k), reduced.energy_b.sum(k),
            )  # fmt: skip
        return reduced


def from_activations(site: Site, moments: CrossMoments, source: BoundModel) -> UnitDistances:
    """… of all samples; every place has size 1, whatever the scale of its activations."""
    sizes_b = [source.architecture.spaces[s].size for s in site.spaces]
    return UnitDistances.of(
        site.name, site.spaces, (site.sizes, sizes_b), moments.cross.T, moments.squares_a, moments.squares_b
    )


def from_weights(
    root: str, source: BoundModel, anchor: BoundModel, plans: TransportPlans, *, without: Container[str] = ()
) -> list[UnitDistances]:
    """What writes to the units of a space and of those inside it, seen through the plans of what it reads from."""
    return [
        _rows(name, axis, number, source, anchor, plans)
        for name, axis, number in _written(root, anchor, plans)
        if name not in without
    ]


def start_of_stream(
    names: Sequence[str], source: BoundModel, anchor: BoundModel, plans: TransportPlans
) -> UnitDistances:
    """Several writers as one place: their features side by side."""
    written = [place for place in _written(RESIDUAL, anchor, plans) if place[0] in names]
    parts = [_rows(name, axis, number, source, anchor, plans) for name, axis, number in written]
    total = parts[0]
    for part in parts[1:]:
        total = replace(
            total, cost=total.cost + part.cost, energy_a=total.energy_a + part.energy_a,
            energy_b=total.energy_b + part.energy_b,
        )  # fmt: skip
    return replace(total, label="the start of the stream")


def reads(root: str, anchor: BoundModel, plans: TransportPlans) -> dict[str, set[str]]:
    """For every weight that writes to a space, the spaces it reads from: none for a table that is looked up."""
    spaces_read = {}
    for name, _, _ in _written(root, anchor, plans):
        layout = anchor.layouts[name]
        atoms = [a for k in input_axes(layout) for segment in layout.axes[k] for a in segment.atoms if not a.free]
        spaces_read[name] = {plans.architecture.root(a.space) for a in atoms}
    return spaces_read


def _written(root: str, anchor: BoundModel, plans: TransportPlans) -> Iterator[tuple[str, int, int]]:
    """(weight, axis, part of that axis) for all that writes to a space."""
    for name, layout in anchor.layouts.items():
        reading = input_axes(layout)
        if len(layout.axes) < 2 or any(_touches(s, root, plans) for k in reading for s in layout.axes[k]):
            continue
        for axis, segments in enumerate(layout.axes):
            for number, segment in enumerate(segments):
                whole = not any(atom.free for atom in segment.atoms)
                if axis not in reading and whole and _touches(segment, root, plans):
                    yield name, axis, number


def _touches(segment: Segment, root: str, plans: TransportPlans) -> bool:
    return any(not a.free and plans.architecture.root(a.space) == root for a in segment.atoms)


def _rows(
    name: str, axis: int, number: int, source: BoundModel, anchor: BoundModel, plans: TransportPlans
) -> UnitDistances:
    """Incoming weights and bias of every unit, as rows."""
    features: list[tuple[Tensor, Tensor]] = []
    bias = anchor.bias_of(name)
    for tensor, at in ((name, axis), *([(bias, 0)] if bias is not None and bias in source.layouts else [])):
        layouts = anchor.layouts[tensor], source.layouts[tensor]
        moved = plans.move(source.raw(tensor), layouts[1], layouts[0], leave=at)
        pair = (anchor.raw(tensor), moved)
        rows = [
            layout.axes[at][number].take(values, at).reshape(math.prod(layout.axes[at][number].sizes), -1)
            for layout, values in zip(layouts, pair, strict=True)
        ]
        features.append((rows[0], rows[1]))
    a, b = (torch.cat([pair[k] for pair in features], 1).cpu() for k in (0, 1))
    segments = anchor.layouts[name].axes[axis][number], source.layouts[name].axes[axis][number]
    spaces = [atom.space for atom in segments[0].atoms]
    sizes = segments[0].sizes, segments[1].sizes
    return UnitDistances.of(name, spaces, sizes, a @ b.T, a.square().sum(1), b.square().sum(1))


def fixed_spaces(plans: TransportPlans) -> set[str]:
    """Spaces whose units keep their place."""
    return {name for name, group in plans.architecture.spaces.items() if not group.movable}
