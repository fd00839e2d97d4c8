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
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair, stream_cross, unit_blocks
from isomerge.alignment.solvers.assignment import assign
from isomerge.alignment.units import Unit
from isomerge.symmetry.architecture import RESIDUAL, Architecture
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

MOST_STEPS = 50
STOPS_RISING = 1e-6  # of F, in a step
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class GraphPair:
    """The tensors that orders move, of both models, and what each counts in F."""

    source: Tensors
    anchor: Tensors
    weights: Mapping[str, float]
    layouts: Mapping[str, Layout]
    architecture: Architecture

    @classmethod
    def of(cls, pair: Pair, weights: Mapping[str, float]) -> GraphPair:
        """Without what has the stream on two axes: an order would count there twice."""
        layouts = {n: pair.layouts[n] for n, weight in weights.items() if weight > 0}
        layouts = {n: lay for n, lay in layouts.items() if len([*lay.segments_with(RESIDUAL)]) < 2}
        own = {n: tuple(t.double() for t in pair.tensors(n)) for n in layouts}
        source, anchor = ({n: both[side] for n, both in own.items()} for side in (0, 1))
        return cls(source, anchor, weights, layouts, pair.architecture)

    def value(self, tensors: Tensors) -> float:
        """F of a source that was moved to these."""
        return sum(self.weights[n] * float((t * self.anchor[n]).sum()) for n, t in tensors.items())

    def moved(self, tensors: Tensors, by: Transform) -> Tensors:
        return {n: by.act(t, self.layouts[n]) for n, t in tensors.items()}

    def evened(self, tensors: Tensors, spaces: Iterable[str]) -> Tensors:
        """The mean of the tensors over every order of these spaces."""
        return {n: _evened(t, self.layouts[n], frozenset(spaces)) for n, t in tensors.items()}

    def beside(self, tensors: Tensors) -> Pair:
        """These tensors as the source."""
        return Pair(tensors.__getitem__, self.anchor.__getitem__, dict(self.layouts), self.architecture)

    def best_stream(self, by_units: Tensors) -> Transform:
        """The best order of the stream next to the soft units: of the gradient of F, (d, d)."""
        spaces, beside = self.architecture.spaces, self.beside(by_units)
        total = torch.zeros(spaces[RESIDUAL].size, spaces[RESIDUAL].size, dtype=torch.float64)
        for name in by_units:
            found = stream_cross(beside, name, Transform(spaces), RESIDUAL)
            if found is not None:
                total += self.weights[name] * found[0].cpu()
        return Transform(spaces, {RESIDUAL: assign(total)})

    def best_units(self, by_stream: Tensors, units: Sequence[Unit], run: Run) -> Transform:
        """The best order of every unit next to the soft stream."""
        spaces, beside = self.architecture.spaces, self.beside(by_stream)
        nowhere = Transform(spaces)
        solved = run(lambda u: u.solve(unit_blocks(beside, u.members, nowhere, diagonal=u.diagonal))[0], units)
        return Transform(spaces, {s: e.cpu() for one in solved for s, e in one.items() if spaces[s].movable})


def stream_order(pair: Pair, units: Sequence[Unit], weights: Mapping[str, float], run: Run) -> Tensor:
    """The order of the stream that the joint problem finds; given it, the best order of every unit is exact."""
    graphs = GraphPair.of(pair, weights)
    size = pair.architecture.spaces[RESIDUAL].size
    # Every tensor as the soft orders of the units alone move it, and as the soft order of the stream alone does.
    by_units = graphs.evened(graphs.source, {s for u in units for s in u.members})
    by_stream = graphs.evened(graphs.source, {RESIDUAL})
    soft = torch.full((size, size), 1 / size, dtype=torch.float64)
    here = graphs.value(graphs.evened(by_units, {RESIDUAL}))
    for _ in range(MOST_STEPS):
        stream, inside = graphs.best_stream(by_units), graphs.best_units(by_stream, units, run)
        to_units, to_stream = graphs.moved(graphs.source, inside), graphs.moved(graphs.source, stream)
        one_side = graphs.value(graphs.moved(by_units, stream)) + graphs.value(graphs.moved(by_stream, inside))
        step, reached = best_step(here, one_side, graphs.value(graphs.moved(to_stream, inside)))
        by_units, by_stream = between(by_units, to_units, step), between(by_stream, to_stream, step)
        soft = torch.lerp(soft, torch.eye(size, dtype=soft.dtype)[:, stream.elements[RESIDUAL]], step)
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


def between(start: Tensors, end: Tensors, step: float) -> Tensors:
    """The models on the line from one to the other."""
    return {n: torch.lerp(t, end[n], step) for n, t in start.items()}


def _evened(tensor: Tensor, layout: Layout, spaces: frozenset[str]) -> Tensor:
    result = tensor.clone()
    for axis, segment in layout.segments_with(*spaces):
        values = segment.take(result, axis)
        places = [place for place, atom in enumerate(segment.atoms) if atom.space in spaces]
        segment.put(result, axis, values.mean(places, keepdim=True).expand_as(values).contiguous())
    return result
