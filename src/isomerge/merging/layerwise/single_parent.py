"""One parent in the shape of the merged model: its stream and its units take up part of the room, or all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isomerge.merging.layerwise.assembly import ChosenUnits, FeatureAssembly, JointStream
from isomerge.merging.layerwise.joint import choosable, stream_of, turns
from isomerge.merging.layerwise.parent_views import ParentView
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel


def single_parent(bound: BoundModel, views: Sequence[ParentView], number: int) -> FeatureAssembly:
    """The parent `number`, and nothing of the others; what there is no room for is cut off."""
    weights = [float(m == number) for m in range(len(views))]
    chosen = {}
    for space, writer in choosable(bound).items():
        size, own = bound.architecture.spaces[space].size, units_in(views[number], bound, writer, space)
        parent = torch.where(torch.arange(size) < own, number, -1)
        chosen[space] = ChosenUnits(parent, torch.arange(size).clamp_max(own - 1), writer, None, None)
    return FeatureAssembly(bound, weights, _stream(bound, views, number), chosen, views=views)


def fits(bound: BoundModel, view: ParentView) -> bool:
    """Whether there is room for the whole of a parent, and for its tokens, so that its function stays what it is."""
    spaces = bound.architecture.spaces
    return (
        view.tokens is None
        and view.width <= spaces[RESIDUAL].size
        and all(
            units_in(view, bound, writer, space) <= spaces[space].size for space, writer in choosable(bound).items()
        )
    )


def units_in(view: ParentView, bound: BoundModel, writer: str, space: str) -> int:
    """How many units a parent has for a space of the merged model."""
    axes = bound.layouts[writer].axes
    axis = next(k for k, segments in enumerate(axes) if segments[0].atoms[0].space == space)
    return len(view.units(writer, bound, axis)[0])


def _stream(bound: BoundModel, views: Sequence[ParentView], number: int) -> JointStream | None:
    group, own = bound.architecture.spaces[RESIDUAL], views[number].width
    if not turns(bound) or all(view.width == group.size for view in views):
        return None
    energy = torch.eye(own, dtype=torch.float64)
    energy = energy - torch.full_like(energy, 1 / own) if group.fixes_ones else energy
    alone = stream_of(energy, [own], [1.0], bound)
    none = [torch.zeros(group.size, view.width, dtype=torch.float64) for view in views]
    return JointStream(
        [alone.into[0] if m == number else p for m, p in enumerate(none)],
        [alone.back[0] if m == number else p.T for m, p in enumerate(none)],
    )
