"""Siblings, found before anything is solved: large models that differ a little are read once, and nothing moves.

Feed-forward units get a proof: the test that needs no cost matrix. Heads and the residual stream are solved on a sample
of the coordinates they are compared by, `SEEN` parameters for every dimension of a space, and must gain no more there
than noise would, as in a whole solve. The sample bounds what can be missed: a move that would explain less than
`MISSED` of the squared distance. Whatever fails is solved as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair, only_noise, squared_distance, unit_blocks
from isomerge.alignment.rounds import Sweeper, Tick
from isomerge.alignment.units import Unit
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform, dimension
from isomerge.threads import Run

LARGE_MODEL = 1 << 26
"""Parameters below which a whole solve costs little."""
SEEN = 16
MISSED = 2 / SEEN  # a gain is noise up to twice the dimension
LEAST_SHARE = 1 / 16  # of the coordinates, however few dimensions a space has
FAR = 0.3
"""Of two models that are this far apart, nothing is expected to stay."""
NOTE = (
    f"siblings by a sample of the weights: a move of heads or of the residual stream that explains less than "
    f"{MISSED:.0%} of what differs would not be seen"
)


def in_place(source: BoundModel, anchor: BoundModel, run: Run, tick: Tick) -> dict[str, str] | None:
    """Why every space of two large models stays, or None where something may have to move."""
    moving = source.architecture.movable()
    if not moving or source.parameters() < LARGE_MODEL or source.architecture.streams not in ([], [RESIDUAL]):
        return None
    layouts = {name: layout for name, layout in source.layouts.items() if name in anchor.layouts}
    pair = Pair(source.stored, anchor.stored, layouts, source.architecture)
    stream = _stream_sample(pair)
    if _are_far(stream):
        return None
    if source.architecture.moves(RESIDUAL) and not Sweeper(stream, run, device=source.device).stream_stays():
        return None
    sweeper = Sweeper(pair, run, tick, device=source.device)
    if not all(run(lambda unit: _unit_stays(sweeper, unit, pair), sweeper.units, sweeper.solved)):
        return None
    return dict.fromkeys(moving, "moving it gains no more than noise would")


def _unit_stays(sweeper: Sweeper, unit: Unit, pair: Pair) -> bool:
    """Proved for units that only change places; by a sample where there is more to choose."""
    spaces = pair.architecture.spaces
    if sweeper.proved_in_place(unit):
        return True
    dimensions = sum(dimension(spaces, space) for space in unit.members)
    sample = _sampled(pair, pair.touching(unit.members), _stream_axis, dimensions)
    blocks = unit_blocks(sample, unit.members, Transform(spaces), diagonal=unit.diagonal)
    elements = {s: e.cpu() for s, e in unit.solve(blocks)[0].items() if spaces[s].movable}
    if any(spaces[s].moves_units(e) for s, e in elements.items()):
        return False
    solved = Transform(spaces, elements).without_identities()
    return all(_gains_nothing(space, solved.only([space]), sample) for space in solved.elements)


def _gains_nothing(space: str, own: Transform, sample: Pair) -> bool:
    pairs = ((sample.layouts[name], *sample.tensors(name)) for name in sample.touching([space]))
    moves = ((start, own.act(start, layout), target) for layout, start, target in pairs)
    return only_noise(own.spaces, space, moves)


def _are_far(sample: Pair) -> bool:
    """By the matrices of a sample, a few of them."""
    names = [name for name, layout in sample.layouts.items() if len(layout.shape) > 1]
    apart = size = 0.0
    for name in names[:: max(1, len(names) // 8)]:
        source, anchor = sample.tensors(name)
        apart += squared_distance(source, anchor)
        size += squared_distance(anchor)
    return not apart <= FAR**2 * size


# --- samples ----------------------------------------------------------------------------------------------------------
def _stream_sample(pair: Pair) -> Pair:
    """What touches the stream, with some of the coordinates that it is compared by."""
    spaces = pair.architecture.spaces
    names = [name for name, layout in pair.layouts.items() if RESIDUAL in layout.spaces()] or list(pair.layouts)
    return _sampled(pair, names, _other_axis, dimension(spaces, RESIDUAL) if RESIDUAL in spaces else 0)


def _sampled(pair: Pair, names: list[str], axis_of: Callable[[Layout], int | None], dimensions: int) -> Pair:
    """A pair with every few coordinates of one axis, enough of them for a space of so many dimensions."""
    axes = {name: axis_of(pair.layouts[name]) for name in names}
    whole = sum(torch.Size(pair.layouts[name].shape).numel() for name in names)
    share = max(LEAST_SHARE, SEEN * dimensions / max(1, whole))
    step = int(1 / share) if share < 1 else 1
    step -= step > 1 and step % 2 == 0  # odd, so that all coordinates of a head have their turn

    def seen(tensor: Tensor, name: str) -> Tensor:
        axis = axes[name]
        part = tensor if axis is None else tensor[(slice(None),) * axis + (slice(None, None, step),)]
        return part.to(torch.float64)

    def shown(layout: Layout, axis: int | None) -> Layout:
        shape = [-(-n // step) if k == axis else n for k, n in enumerate(layout.shape)]
        return replace(layout, shape=tuple(shape))

    layouts = {name: shown(pair.layouts[name], axes[name]) for name in names}
    return Pair(
        lambda name: seen(pair.source(name), name), lambda name: seen(pair.anchor(name), name), layouts,
        pair.architecture,
    )  # fmt: skip


def _stream_axis(layout: Layout) -> int | None:
    return layout.axis_of(RESIDUAL) if len(layout.shape) > 1 else None


def _other_axis(layout: Layout) -> int | None:
    """The axis of a matrix across the stream."""
    axis = _stream_axis(layout)
    return None if axis is None or len(layout.shape) != 2 else 1 - axis
