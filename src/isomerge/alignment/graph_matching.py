"""Graph matching: the orders of the stream and of all other units at once, as one quadratic assignment.

Two models are two graphs. Their nodes are units, an edge is the weight between a unit of the stream and a hidden unit
or a unit inside a head, and what a unit has alone (its bias, its column of a table) is its own affinity. The best
orders maximise F = Σ w ⟨g·B, A⟩ over all tensors, the objective of the sweep. It is quadratic: an edge moves with both
its ends.

The sweep fixes one end and solves for the other. Here both are relaxed: soft orders in the convex hull of the exact
ones, which start at the mean of all of them, move towards the exact orders that the gradient of F asks for (one linear
assignment for each space, heads with their insides), by the step that is best on the line. This is the FAQ algorithm,
scipy.optimize.quadratic_assignment, on blocks: units of different spaces are never compared, heads stay whole, and a
gated unit may have three edges to a unit of the stream where a graph has two.

References: Liu et al., "Deep neural network fusion via graph matching" (GAMF, ICML 2022); Vogelstein et al., "Fast
approximate quadratic programming for graph matching" (2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair, stream_cross, unit_blocks
from isomerge.alignment.solvers.assignment import assign
from isomerge.alignment.units import Unit
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

MOST_STEPS = 50
STOPS_RISING = 1e-6  # of F: what the line to the next orders can still promise
Tensors = dict[str, Tensor]


def stream_order(pair: Pair, units: Sequence[Unit], weights: Mapping[str, float], run: Run) -> Tensor:
    """The order of the stream that the joint problem finds; given it, the best order of every unit is exact."""
    spaces = pair.architecture.spaces
    names = [n for n, weight in weights.items() if weight > 0 and len([*pair.layouts[n].segments_with(RESIDUAL)]) < 2]
    own = {n: tuple(t.double() for t in pair.tensors(n)) for n in names}
    source, anchor = ({n: both[side] for n, both in own.items()} for side in (0, 1))

    def value(tensors: Tensors) -> float:
        return sum(weights[n] * float((tensors[n] * anchor[n]).sum()) for n in names)

    def moved(tensors: Tensors, by: Transform) -> Tensors:
        return {n: by.act(t, pair.layouts[n]) for n, t in tensors.items()}

    def given(tensors: Tensors) -> Pair:
        return Pair(tensors.__getitem__, anchor.__getitem__, {n: pair.layouts[n] for n in names}, pair.architecture)

    # Every tensor as the soft orders of the units alone move it, and as the soft order of the stream alone does.
    by_units = {n: _evened(t, pair.layouts[n], {s for u in units for s in u.members}) for n, t in source.items()}
    by_stream = {n: _evened(t, pair.layouts[n], {RESIDUAL}) for n, t in source.items()}
    soft = torch.full((spaces[RESIDUAL].size,) * 2, 1 / spaces[RESIDUAL].size, dtype=torch.float64)
    here = value({n: _evened(t, pair.layouts[n], {RESIDUAL}) for n, t in by_units.items()})
    for _ in range(MOST_STEPS):
        order = assign(_stream_gradient(given(by_units), names, weights, soft))
        stream = Transform(spaces, {RESIDUAL: order})
        inside = _best_units(given(by_stream), units, run)
        to_units, to_stream = moved(source, inside), moved(source, stream)
        one_side = value(moved(by_units, stream)) + value(moved(by_stream, inside))
        there = value(moved(to_stream, inside))
        step, reached = best_step(here, one_side, there)
        by_units, by_stream = _between(by_units, to_units, step), _between(by_stream, to_stream, step)
        soft = torch.lerp(soft, torch.eye(len(soft), dtype=soft.dtype)[:, order], step)
        rise, here = reached - here, reached
        if rise <= STOPS_RISING * abs(here):
            break
    return assign(soft)


def best_step(here: float, one_side: float, there: float) -> tuple[float, float]:
    """The best step t in [0, 1], and F there: F is (1 − t)² here + t (1 − t) one_side + t² there on the line.

    >>> best_step(0.0, 2.0, 0.0), best_step(0.0, 1.0, 3.0), best_step(2.0, 1.0, 0.0)
    ((0.5, 0.5), (1.0, 3.0), (0.0, 2.0))
    """
    slope, bend = one_side - 2 * here, here - one_side + there
    steps = [0.0, 1.0]
    if bend < 0:
        steps.append(min(1.0, max(0.0, -slope / (2 * bend))))
    step = max(steps, key=lambda t: here + t * slope + t * t * bend)
    return step, here + step * slope + step * step * bend


def _between(start: Tensors, end: Tensors, step: float) -> Tensors:
    return {n: torch.lerp(t, end[n], step) for n, t in start.items()}


def _stream_gradient(pair: Pair, names: Iterable[str], weights: Mapping[str, float], like: Tensor) -> Tensor:
    """What each unit of the source's stream earns in each place of the anchor's, next to the soft units: (d, d)."""
    total, nowhere = torch.zeros_like(like), Transform(pair.architecture.spaces)
    for name in names:
        found = stream_cross(pair, name, nowhere, RESIDUAL)
        if found is not None:
            total += weights[name] * found[0].cpu()
    return total


def _best_units(pair: Pair, units: Sequence[Unit], run: Run) -> Transform:
    """The best order of every unit, next to the soft stream."""
    spaces = pair.architecture.spaces
    nowhere = Transform(spaces)
    solved = run(lambda u: u.solve(unit_blocks(pair, u.members, nowhere, diagonal=u.diagonal))[0], units)
    return Transform(spaces, {s: e.cpu() for one in solved for s, e in one.items() if spaces[s].movable})


def _evened(tensor: Tensor, layout: Layout, spaces: set[str]) -> Tensor:
    """The mean of a tensor over every order of these spaces."""
    result = tensor.clone()
    for axis, segment in layout.segments_with(*spaces):
        values = segment.take(result, axis)
        places = [place for place, atom in enumerate(segment.atoms) if atom.space in spaces]
        segment.put(result, axis, values.mean(places, keepdim=True).expand_as(values).contiguous())
    return result
