"""How the features of the merged model are made of its parents': space by space, the same for weights and for targets.

Averaging takes the weighted mean in every space. Joint features do better where the parents disagree: the parents side
by side are one wide network (the ensemble), and it is brought to the width of one parent. In the residual stream z = Σ
P_m s_m, with s_m ≈ I_m z back again; units and heads are chosen, some from each parent. A reader then takes I_m on its
input, a writer P_m on its output, and a space of chosen units takes their rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from isomerge.merging.layerwise.parents import State
from isomerge.merging.layerwise.roles import saved_names
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Layout, Segment


@dataclass(frozen=True)
class JointStream:
    """The merged residual stream: `into[m]` is P_m and `back[m]` is I_m, both (width, width)."""

    into: list[Tensor]
    back: list[Tensor]


@dataclass(frozen=True)
class ChosenUnits:
    """For every unit of the merged space: the parent it comes from, and which of its units it is."""

    parent: Tensor
    unit: Tensor
    writer: str
    """The weight that writes what they give to the stream, by its name in the specification."""
    written: Tensor
    """This weight: what they wrote in their parent and, as far as they can say it, what those left out wrote."""
    shift: Tensor | None
    """To add to its bias: the mean of what those left out wrote, less what the chosen ones say of it."""


@dataclass
class FeatureAssembly:
    """Spaces that are not named here are averaged."""

    bound: BoundModel
    weights: Sequence[float]
    stream: JointStream | None = None
    chosen: Mapping[str, ChosenUnits] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in memory -> name on disk (the first, where one parameter is several tensors there)."""

    def summary(self) -> dict[str, object]:
        """For the report: how many units of each space come from which parent."""
        count = len(self.weights)
        shares = {space: torch.bincount(c.parent, minlength=count).tolist() for space, c in self.chosen.items()}
        return {"stream": "joint" if self.stream is not None else "mean", "chosen": shares}

    # --- outputs of the parents -> target of the merged model ---------------------------------------------------------
    def combine(
        self, name: str, values: Sequence[Tensor], *, follows: bool = False, believed: Tensor | None = None
    ) -> Tensor:
        """Rows (n, out) that each parent gives at the map `name`, or at the sum it goes into (`follows`).

        `believed` (parents, n): how much each counts, where that is not its share. A joint stream carries all parents
        at once, and a chosen unit is one parent's: there it is for the reader to tell them apart.
        """
        layout = self.bound.layouts.get(self.described(name))
        if layout is not None and self.stream is not None and (follows or _writes(layout)):
            return sum_of(v @ p.T.to(v) for v, p in zip(values, self.stream.into, strict=True))
        chosen = None if layout is None or follows or _writes(layout) else self._chosen_axis(layout)
        if chosen is None:
            shares = self.weights if believed is None else believed[:, :, None].to(values[0])
            return sum_of(v * w for v, w in zip(values, shares, strict=True))
        parent, position = chosen[1]
        return torch.cat(list(values), 1)[:, (parent * values[0].shape[1] + position).to(values[0].device)]

    def owners(self, name: str) -> Tensor | None:
        """For every output of the map `name`, the parent it is taken from; None where it is made of all."""
        layout = self.bound.layouts.get(self.described(name))
        if layout is None or _writes(layout) or (chosen := self._chosen_axis(layout)) is None:
            return None
        return chosen[1][0]

    def described(self, name: str) -> str:
        """Name in memory -> name in the specification."""
        saved = self.names.get(name, name)
        return self._described.get(saved, saved)

    @cached_property
    def _described(self) -> dict[str, str]:
        return {saved: name for name in self.bound.files for saved in saved_names(self.bound, name)}

    # --- weights of the parents -> weights to start from --------------------------------------------------------------
    def state(self, states: Sequence[State]) -> State:
        """By names on disk, in float64; what is not a number with a fraction comes from the first."""
        bound = self.bound
        writers = {c.writer: c.written.double() for c in self.chosen.values()}
        shifts = {bound.bias_of(c.writer): c.shift for c in self.chosen.values() if c.shift is not None}
        merged: State = {}
        for name, layout in bound.layouts.items():
            files = bound.files.get(name, (name,))
            if any(file not in states[0] for file in files):
                continue  # a tied table: nothing is stored
            if name in writers:
                whole = writers[name]
            else:
                own = (torch.cat([s[f].double() for f in files], bound.stacks.get(name, 0)) for s in states)
                whole = sum_of(self._part(m, tensor, layout) for m, tensor in enumerate(own))
            if name in shifts:
                whole = whole + shifts[name].to(whole)
            merged |= bound.split(name, whole)
        for file, first in states[0].items():  # what has no layout
            if file not in merged:
                parts = (state[file].double() * w for state, w in zip(states, self.weights, strict=True))
                merged[file] = sum_of(parts) if first.is_floating_point() else first
        return merged

    def _part(self, m: int, tensor: Tensor, layout: Layout) -> Tensor:
        """What parent m adds to a tensor of the merged model."""
        writes = self.stream is not None and _writes(layout)
        chosen = self._chosen_axis(layout)
        if chosen is not None:
            axis, (parent, position) = chosen
            own = (parent == m).to(tensor)
            shape = [-1 if k == axis else 1 for k in range(tensor.ndim)]
            tensor = tensor.index_select(axis, position) * own.reshape(shape)
        if self.stream is not None:
            if writes:
                tensor = _along(tensor, layout.axis_of(RESIDUAL, dual=False), self.stream.into[m])
            if (axis_in := layout.axis_of(RESIDUAL, dual=True)) is not None:
                tensor = _along(tensor, axis_in, self.stream.back[m].T)
        return tensor if writes or chosen is not None else tensor * self.weights[m]

    def _chosen_axis(self, layout: Layout) -> tuple[int, tuple[Tensor, Tensor]] | None:
        """The axis of a layout that has a space of chosen units, and for each of its positions: parent, position."""
        for number, axis in enumerate(layout.axes):
            if any(segment.atoms[0].space in self.chosen for segment in axis):
                parent = torch.zeros(layout.shape[number], dtype=torch.int64)
                position = torch.arange(layout.shape[number])
                for segment in axis:
                    chosen = self.chosen[segment.atoms[0].space]
                    at = positions(segment, layout.shape[number])
                    shape = (-1, *[1] * (at.ndim - 1))
                    parent[at] = chosen.parent.reshape(shape).expand_as(at)
                    position[at] = at[chosen.unit]
                return number, (parent, position)
        return None


def positions(segment: Segment, length: int) -> Tensor:
    """Where a segment lies on its axis, shaped like its sizes."""
    return segment.index if segment.index is not None else torch.arange(length).reshape(segment.sizes)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total


def _writes(layout: Layout) -> bool:
    axis = layout.axis_of(RESIDUAL, dual=False)
    return axis is not None and not layout.axes[axis][0].atoms[0].unsigned


def _along(tensor: Tensor, axis: int | None, matrix: Tensor) -> Tensor:
    assert axis is not None
    return torch.movedim(torch.movedim(tensor, axis, -1) @ matrix.T.to(tensor), -1, axis)
