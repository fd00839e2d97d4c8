"""How the features of the merged model are made of its parents': space by space, the same for weights and for targets.

Averaging takes the weighted mean in every space. Joint features do better where the parents disagree: the parents side
by side are one wide network (the ensemble), and it is brought to the width of the merged model. In the residual stream
z = Σ P_m s_m, with s_m ≈ I_m z back again; units and heads are chosen, some from each parent. A reader then takes I_m
on its input, a writer P_m on its output, and a space of chosen units takes their rows or columns. Nothing of this asks
that the parents, or the merged model, be of one shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from isomerge.merging.layerwise.parent_views import ParentView, State, is_gain, positions
from isomerge.merging.layerwise.roles import saved_names
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Layout


@dataclass(frozen=True)
class JointStream:
    """The merged residual stream: `into[m]` is P_m (width, width of m) and `back[m]` is I_m (width of m, width)."""

    into: list[Tensor]
    back: list[Tensor]
    lost: Mapping[str, float] = field(default_factory=dict)
    """By the map that wrote last: the share of the streams' energy that the merged one does not hold."""


@dataclass(frozen=True)
class ChosenUnits:
    """For every unit of the merged space: the parent it comes from (-1: none), and which of its units it is."""

    parent: Tensor
    unit: Tensor
    writer: str
    """The weight that writes what they give to the stream, by its name in the specification."""
    written: Tensor | None
    """This weight: what they wrote in their parent and, as far as they can say it, what those left out wrote. None:
    what they wrote in their parent."""
    shift: Tensor | None
    """To add to its bias: the mean of what those left out wrote, less what the chosen ones say of it."""
    lost: float = 0.0
    """The share of the energy of what all units write that the chosen ones cannot say."""


@dataclass
class FeatureAssembly:
    """Spaces that are not named here are averaged."""

    bound: BoundModel
    weights: Sequence[float]
    stream: JointStream | None = None
    chosen: Mapping[str, ChosenUnits] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in memory -> name on disk (the first, where one parameter is several tensors there)."""
    views: Sequence[ParentView] = ()
    """The parents; none: all are of the shape of the merged model, which `bound` describes."""

    def __post_init__(self) -> None:
        self.views = self.views or [ParentView(self.bound)] * len(self.weights)

    def summary(self) -> dict[str, object]:
        """For the report: how many units of each space come from which parent, and what had no room."""
        count = len(self.weights)
        shares = {
            space: torch.bincount(c.parent[c.parent >= 0], minlength=count).tolist() for space, c in self.chosen.items()
        }
        lost = {space: c.lost for space, c in self.chosen.items()}
        return {
            "stream": "joint" if self.stream is not None else "mean", "chosen": shares,
            "lost": {"stream": dict(self.stream.lost) if self.stream is not None else {}, "chosen": lost},
        }  # fmt: skip

    # --- outputs of the parents -> target of the merged model ---------------------------------------------------------
    def combine(
        self, name: str, values: Sequence[Tensor], *, follows: bool = False, believed: Tensor | None = None
    ) -> Tensor:
        """Rows (n, out) that each parent gives at the map `name`, or at the sum it goes into (`follows`).

        `believed` (parents, n): how much each counts, where that is not its share. A joint stream carries all parents
        at once, and a chosen unit is one parent's: there it is for the reader to tell them apart.
        """
        described = self.described(name)
        layout = self.bound.layouts.get(described)
        if layout is not None and self.stream is not None and (follows or _writes(layout)):
            return sum_of(v @ p.T.to(v) for v, p in zip(values, self.stream.into, strict=True))
        chosen = None if layout is None or follows or _writes(layout) else self._chosen_axis(described)
        if chosen is None:
            shares = self.weights if believed is None else believed[:, :, None].to(values[0])
            return sum_of(v * w for v, w in zip(values, shares, strict=True))
        offsets = itertools.accumulate([0, *(v.shape[1] for v in values[:-1])])
        at = torch.stack([torch.where(own >= 0, own + k, -1) for own, k in zip(chosen[1], offsets, strict=True)])
        return taken(torch.cat(list(values), 1), 1, at.amax(0))

    def owners(self, name: str) -> Tensor | None:
        """For every output of the map `name`, the parent it is taken from; None where it is made of all."""
        described = self.described(name)
        layout = self.bound.layouts.get(described)
        if layout is None or _writes(layout) or (chosen := self._chosen_axis(described)) is None:
            return None
        return torch.stack(chosen[1]).argmax(0)

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
        writers = {c.writer: c.written.double() for c in self.chosen.values() if c.written is not None}
        shifts = {bound.bias_of(c.writer): c.shift for c in self.chosen.values() if c.shift is not None}
        merged: State = {}
        for name in bound.layouts:
            files = bound.files.get(name, (name,))
            if any(file not in states[0] for file in files):
                continue  # a tied table: nothing is stored
            if name in writers:
                whole = writers[name]
            else:
                whole = sum_of(self._part(m, state, name) for m, state in enumerate(states))
            if name in shifts:
                whole = whole + shifts[name].to(whole)
            merged |= bound.split(name, whole)
        for file, first in states[0].items():  # what has no layout
            if file not in merged:
                same = all(file in state and state[file].shape == first.shape for state in states)
                parts = (state[file].double() * w for state, w in zip(states, self.weights, strict=True) if same)
                merged[file] = sum_of(parts) if first.is_floating_point() and same else first
        return merged

    def _part(self, m: int, state: State, name: str) -> Tensor:
        """What parent m adds to a tensor of the merged model."""
        layout = self.bound.layouts[name]
        writes = self.stream is not None and _writes(layout)
        chosen = self._chosen_axis(name)
        tensor = self.views[m].tensor(state, name, chosen[0] if chosen else None)
        if chosen is not None:
            axis, own = chosen
            tensor = taken(tensor, axis, own[m])
        if self.stream is not None:
            if writes:
                tensor = _along(tensor, layout.axis_of(RESIDUAL, dual=False), self.stream.into[m])
            elif is_gain(layout) and layout.axis_of(RESIDUAL) is not None and tensor.shape != layout.shape:
                tensor = tensor.mean().expand(layout.shape)  # folded, so all entries are the same
            if (axis_in := layout.axis_of(RESIDUAL, dual=True)) is not None:
                tensor = _along(tensor, axis_in, self.stream.back[m].T)
        return tensor if writes or chosen is not None else tensor * self.weights[m]

    def _chosen_axis(self, name: str) -> tuple[int, list[Tensor]] | None:
        """The axis of a tensor that has a space of chosen units, and where each of its positions comes from: for every
        parent the position there, or -1."""
        layout = self.bound.layouts[name]
        for number, axis in enumerate(layout.axes):
            if not any(segment.atoms[0].space in self.chosen for segment in axis):
                continue
            sources = [torch.full((layout.shape[number],), -1) for _ in self.views]
            for m, view in enumerate(self.views):
                for segment, table in zip(axis, view.units(name, self.bound, number), strict=True):
                    chosen = self.chosen[segment.atoms[0].space]
                    own = chosen.parent == m
                    sources[m][positions(segment, layout.shape[number])[own]] = table[chosen.unit[own]]
            return number, sources
        return None


def taken(tensor: Tensor, axis: int, at: Tensor) -> Tensor:
    """These places of an axis, zeros where the place is -1."""
    at = at.to(tensor.device)
    if tensor.shape[axis] == 0:
        return tensor.new_zeros(*tensor.shape[:axis], len(at), *tensor.shape[axis + 1 :])
    shape = [-1 if k == axis else 1 for k in range(tensor.ndim)]
    found = tensor.index_select(axis, at.clamp_min(0))
    return found if bool((at >= 0).all()) else found * (at >= 0).to(tensor).reshape(shape)


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
