"""What says how far two units are apart: their activations on the same inputs, or the weights they read with.

    C_ij = ‖x_i − y_j‖²

with x_i all activations of unit i of the anchor, and y_j those of unit j of the source; or with their incoming weights
and biases, the source's seen through the maps of the units they come from.

For Gromov–Wasserstein plans also the squared distances within each model, ‖x_i − x_j‖² and ‖y_i − y_j‖²: they need
nothing that the models have in common, so weights are taken as they stand.
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
    within: tuple[Tensor, Tensor] | None = None
    """Squared distances inside the anchor and inside the source, where asked for: axes are the spaces twice."""

    @classmethod
    def of(
        cls, label: str, spaces: Sequence[str], sizes: tuple[Sequence[int], Sequence[int]], cross: Tensor,
        energy_a: Tensor, energy_b: Tensor, grams: tuple[Tensor, Tensor] | None = None,
    ) -> UnitDistances:  # fmt: skip
        """`grams`: the inner products of the units of each model, for the distances within."""
        shaped = _squared(energy_a, energy_b, cross).reshape(*sizes[0], *sizes[1])
        within = None
        if grams is not None:
            within = (
                _squared(energy_a, energy_a, grams[0]).reshape(*sizes[0], *sizes[0]),
                _squared(energy_b, energy_b, grams[1]).reshape(*sizes[1], *sizes[1]),
            )
        return cls(label, tuple(spaces), shaped, energy_a.reshape(*sizes[0]), energy_b.reshape(*sizes[1]), within)

    @property
    def size(self) -> float:
        """The norm of everything that is seen here, of both models alike."""
        return float((self.energy_a.sum() * self.energy_b.sum()) ** 0.25)

    def normalised(self) -> UnitDistances:
        """Of size 1, so that every place counts the same."""
        scale = self.size**2
        if not scale > 0:
            return self
        within = None if self.within is None else (self.within[0] / scale, self.within[1] / scale)
        return replace(
            self, cost=self.cost / scale, energy_a=self.energy_a / scale, energy_b=self.energy_b / scale, within=within
        )  # fmt: skip

    def without(self, fixed: set[str]) -> UnitDistances:
        """Spaces whose units keep their place are not looked at unit by unit: only i with i counts."""
        reduced = self
        for space in [s for s in self.spaces if s in fixed]:
            k = reduced.spaces.index(space)
            within = None if reduced.within is None else (_traced(reduced.within[0], k), _traced(reduced.within[1], k))
            reduced = UnitDistances(
                reduced.label, tuple(s for s in reduced.spaces if s != space),
                _traced(reduced.cost, k), reduced.energy_a.sum(k), reduced.energy_b.sum(k), within,
            )  # fmt: skip
        return reduced


def _squared(first: Tensor, second: Tensor, products: Tensor) -> Tensor:
    """‖x_i − y_j‖² from the squares and the inner products."""
    return (first[:, None] + second - 2 * products).clamp(min=0)


def _traced(distances: Tensor, axis: int) -> Tensor:
    """Summed over one space, whose units go with themselves; both models' axes have the same order."""
    return distances.diagonal(dim1=axis, dim2=distances.ndim // 2 + axis).sum(-1)


def sum_of(distances: Sequence[UnitDistances], label: str) -> UnitDistances:
    """Several pieces of evidence on the same spaces: their features side by side."""
    total = distances[0]
    for one in distances[1:]:
        within = None
        if total.within is not None and one.within is not None:
            within = (total.within[0] + one.within[0], total.within[1] + one.within[1])
        total = replace(
            total, cost=total.cost + one.cost, energy_a=total.energy_a + one.energy_a,
            energy_b=total.energy_b + one.energy_b, within=within,
        )  # fmt: skip
    return replace(total, label=label)


def from_activations(
    site: Site, moments: CrossMoments, source: BoundModel, grams: tuple[Tensor, Tensor] | None = None
) -> UnitDistances:
    """… of all samples; every place has size 1, whatever the scale of its activations. `grams`: Σ x xᵀ of the anchor
    and of the source."""
    sizes_b = [source.architecture.spaces[s].size for s in site.spaces]
    return UnitDistances.of(
        site.name, site.spaces, (site.sizes, sizes_b), moments.cross.T, moments.squares_a, moments.squares_b, grams
    )


def from_weights(
    root: str, source: BoundModel, anchor: BoundModel, plans: TransportPlans, *, without: Container[str] = (),
    within: bool = False,
) -> list[UnitDistances]:  # fmt: skip
    """What writes to the units of a space and of those inside it, seen through the plans of what it reads from."""
    return [
        _rows(name, axis, number, source, anchor, plans, within)
        for name, axis, number in _written(root, anchor, plans)
        if name not in without
    ]


def start_of_stream(
    names: Sequence[str], source: BoundModel, anchor: BoundModel, plans: TransportPlans, *, within: bool = False
) -> UnitDistances:
    """Several writers as one place: their features side by side."""
    written = [place for place in _written(RESIDUAL, anchor, plans) if place[0] in names]
    parts = [_rows(name, axis, number, source, anchor, plans, within) for name, axis, number in written]
    return sum_of(parts, "the start of the stream")


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
    name: str, axis: int, number: int, source: BoundModel, anchor: BoundModel, plans: TransportPlans, within: bool
) -> UnitDistances:
    """Incoming weights and bias of every unit, as rows."""
    features: list[tuple[Tensor, ...]] = []
    bias = anchor.bias_of(name)
    for tensor, at in ((name, axis), *([(bias, 0)] if bias is not None and bias in source.layouts else [])):
        own, other = anchor.layouts[tensor].axes[at][number], source.layouts[tensor].axes[at][number]
        raw = source.raw(tensor)
        moved = plans.move(raw, source.layouts[tensor], anchor.layouts[tensor], leave=at)
        rows = [_as_rows(own, anchor.raw(tensor), at), _as_rows(other, moved, at)]
        features.append((*rows, *([_as_rows(other, raw, at)] if within else [])))
    a, b, *alone = (torch.cat(parts, 1).cpu() for parts in zip(*features, strict=True))
    segments = anchor.layouts[name].axes[axis][number], source.layouts[name].axes[axis][number]
    spaces = [atom.space for atom in segments[0].atoms]
    sizes = segments[0].sizes, segments[1].sizes
    found = UnitDistances.of(name, spaces, sizes, a @ b.T, a.square().sum(1), b.square().sum(1))
    if not alone:
        return found
    inner = UnitDistances.of(
        name, spaces, sizes, a @ b.T, a.square().sum(1), alone[0].square().sum(1), (a @ a.T, alone[0] @ alone[0].T)
    )
    return replace(found, within=inner.within)


def _as_rows(segment: Segment, values: Tensor, axis: int) -> Tensor:
    return segment.take(values, axis).reshape(math.prod(segment.sizes), -1)


def fixed_spaces(plans: TransportPlans) -> set[str]:
    """Spaces whose units keep their place."""
    return {name for name, group in plans.architecture.spaces.items() if not group.movable}
