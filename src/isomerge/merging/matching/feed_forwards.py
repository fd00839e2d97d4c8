"""The feed-forwards of a merged model, made of units of several models; all else is their mean.

A merged unit reads what a mean of its units reads, and what it gives is handed on with the weights of all of them:

    W_in = Σ_k M_k W_in,k        W_out = Σ_k W_out,k U_k

The stream stays the mean of the models' streams, so a unit that only model k has counts with the share of k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.errors import RequestError
from isomerge.kinship import are_related
from isomerge.merging.layerwise.joint import choosable
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.layerwise.parents import ParentModels, least_cosine, read_parents
from isomerge.merging.layerwise.width import Width, widen
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.symmetry.architecture import part_of
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Layout

NOT_ALIGNED = (
    "the models were trained apart and were not aligned: {method} matches feed-forward units only, and averages heads "
    "and the residual stream as they stand; use align"
)


@dataclass(frozen=True)
class UnitMaps:
    """Of one feed-forward, for each model: (merged units, units of the model)."""

    read: Sequence[Tensor]
    """M: every merged unit's row over all models sums to 1."""
    hand_on: Sequence[Tensor]
    """Uᵀ."""

    @property
    def count(self) -> int:
        return len(self.read[0])

    def padded(self, count: int) -> UnitMaps:
        """With units that read nothing and hand nothing on."""

        def longer(maps: Sequence[Tensor]) -> list[Tensor]:
            return [torch.cat([one, one.new_zeros(count - len(one), one.shape[1])]) for one in maps]

        return UnitMaps(longer(self.read), longer(self.hand_on))


@dataclass(frozen=True)
class FeedForwards:
    """The models in one basis, and which of their spaces are treated here."""

    parents: ParentModels
    states: Sequence[State]
    shares: Sequence[float]
    writers: Mapping[str, str]
    """Space of units -> the weight that hands on what they give."""
    first: Checkpoint

    @classmethod
    def of(cls, inputs: MergeInputs, shares: Sequence[float], method: str) -> FeedForwards:
        parents, states = read_parents(inputs)
        known = choosable(parents.bound)
        writers = {space: weight for space, weight in known.items() if part_of(space) == "ffn"}
        if not writers:
            family = parents.bound.architecture.family or parents.config.get("model_type")
            raise RequestError(
                f"{method}: of a '{family}' model no feed-forward is known whose units could be matched one by one. "
                "Use reconstruct, or align and average."
            )
        if inputs.align is None and not are_related(least_cosine(inputs.models)):
            parents.notes.append(NOT_ALIGNED.format(method=method))
        return cls(parents, states, shares, writers, inputs.models[0])

    def parts(self, space: str) -> list[tuple[str, int]]:
        """All weights and biases of the units of a space, and the axis they are on."""
        layouts = self.parents.bound.layouts
        return [
            (name, axis)
            for name in self.parents.bound.touching(space)
            for axis, segments in enumerate(layouts[name].axes)
            if any(segment.atoms[0].space == space for segment in segments)
        ]

    def units(self, space: str, *, handing_on: bool) -> list[Tensor]:
        """For each model (units, features): all weights a unit reads with and its biases; or also those it hands on
        with."""
        names = [(n, axis) for n, axis in self.parts(space) if handing_on or n != self.writers[space]]
        layouts = self.parents.bound.layouts
        return [
            torch.cat([rows for n, axis in names for rows in _rows(layouts[n], axis, state[self._file(n)])], 1)
            for state in self.states
        ]

    def merged(self, maps: Mapping[str, UnitMaps]) -> tuple[ParentModels, State]:
        """The merged model, as wide as the widest feed-forward needs, in float64. Feed-forwards without maps are
        averaged."""
        state: State = {}
        for name, tensor in self.states[0].items():
            whole = [s * one[name].double() for s, one in zip(self.shares, self.states, strict=True)]
            state[name] = sum(whole[1:], whole[0]) if tensor.is_floating_point() else tensor
        parents = self._wide_enough(maps)
        for space, weight in self.writers.items():
            own = self._identity(space) if space not in maps else maps[space]
            own = own.padded(parents.bound.architecture.spaces[space].size)
            for name, axis in self.parts(space):
                matrices = own.hand_on if name == weight else own.read
                state[self._file(name)] = self._combined(parents.bound, name, axis, matrices)
        return parents, state

    def _combined(self, wide: BoundModel, name: str, axis: int, matrices: Sequence[Tensor]) -> Tensor:
        own, new = self.parents.bound.layouts[name], wide.layouts[name]
        result = torch.zeros(new.shape, dtype=torch.float64)
        rows = [_rows(own, axis, state[self._file(name)]) for state in self.states]
        for number, segment in enumerate(new.axes[axis]):
            parts = [matrix @ one[number] for matrix, one in zip(matrices, rows, strict=True)]
            segment.put(result, axis, sum(parts[1:], parts[0]))
        return result

    def _wide_enough(self, maps: Mapping[str, UnitMaps]) -> ParentModels:
        sizes = {space: self.parents.bound.architecture.spaces[space].size for space in self.writers}
        factor = max((one.count / sizes[space] for space, one in maps.items()), default=1.0)
        return widen(self.parents, Width(units=max(1.0, factor)))

    def _identity(self, space: str) -> UnitMaps:
        eye = torch.eye(self.parents.bound.architecture.spaces[space].size, dtype=torch.float64)
        shared = [share * eye for share in self.shares]
        return UnitMaps(shared, shared)

    def result(self, parents: ParentModels, state: State, record: dict[str, Any], **changes: Any) -> MergedWeights:
        """What a method hands back; `changes` are of the config."""
        first = dict(self.first.config)
        config = {k: v for k, v in {**parents.config, **changes}.items() if k not in first or first[k] != v}
        plan = {name: TensorInfo(tuple(state[name].shape), info.dtype) for name, info in parents.plan.items()}
        record = {"weights": list(self.shares), **record, **({"width": parents.room} if parents.room else {})}
        return MergedWeights(state, plan, config, parents.alignment, parents.notes, record)

    def _file(self, name: str) -> str:
        return self.parents.bound.files[name][0]


def _rows(layout: Layout, axis: int, tensor: Tensor) -> list[Tensor]:
    """One row per unit, for every part of the axis."""
    return [
        (values := segment.take(tensor.double().cpu(), axis)).reshape(values.shape[0], -1)
        for segment in layout.axes[axis]
    ]
