"""Models with several residual streams (two towers, stages of several widths): one stream after the other.

Each is solved beside those that are known, with the units it shares tensors with, and again until none moves. The first
time, what joins a stream to one that is not known yet says nothing, or it would speak of the order that one happens to
have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from isomerge.alignment.rounds import Sweeper, no_tick
from isomerge.alignment.units import Elements
from isomerge.symmetry.transform import Transform


def solve_all(sweeper: Sweeper, sweeps: int) -> Transform:
    """Every space of a pair, however many streams it has."""
    streams = sweeper.pair.architecture.streams
    if len(streams) < 2:
        return sweeper.solve(sweeps)
    known: Elements = {}
    for sweep in range(max(2, sweeps)):
        before = dict(known)
        for place, stream in enumerate(streams):
            later = streams[place + 1 :] if sweep == 0 else []
            beside = {s: e for s, e in known.items() if s != stream}
            solved = _part(sweeper, stream, beside, later).solve(sweeps).elements
            known = {**beside, **{s: e for s, e in solved.items() if s == stream}}
        if before.keys() == known.keys() and all(torch.equal(before[s], known[s]) for s in known):
            break
    last = replace(sweeper, beside=Transform(sweeper.pair.architecture.spaces, known))
    return last.solve_units()


def _part(sweeper: Sweeper, stream: str, beside: Elements, unknown: Collection[str]) -> Sweeper:
    """The sweep of one stream: its own tensors, and all tensors of the units these belong to."""
    root_of = sweeper.pair.architecture.root
    roots = {name: {root_of(s) for s in layout.spaces()} for name, layout in sweeper.pair.layouts.items()}
    own = {root for found in roots.values() if stream in found for root in found} - {*beside, *unknown}
    names = [name for name, found in roots.items() if found & own and not found & {*unknown}]
    pair, rough = (
        None if p is None else replace(p, layouts={n: p.layouts[n] for n in names})
        for p in (sweeper.pair, sweeper.rough_pair)
    )
    assert pair is not None
    around = Transform(pair.architecture.spaces, beside)
    return replace(sweeper, pair=pair, rough_pair=rough, stream_name=stream, beside=around, tick=no_tick, objective=[])
