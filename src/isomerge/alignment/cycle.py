"""Cycle-consistent matching: every pair of models at once, through one common space.

Maximised is Σ_{p<q} ⟨g_p·B_p, g_q·B_q⟩: not how near each model is to one, but how near all are to each other. Model p
is taken to q by g_q⁻¹ g_p, so going round a cycle of models always ends where it began.

This is Frank–Wolfe. Soft models S_p, convex combinations of moved ones, start next to the medoid. Every model is then
solved against the mean of all *others*, which is the gradient; all move towards what was found by the step that is best
on the line, and the best of the exact transforms on the way is the result.

Reference: Crisostomi et al., "C²M³: Cycle-consistent multi-model merging" (NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair, common_part
from isomerge.alignment.graph_matching import Tensors, best_step, between
from isomerge.alignment.rounds import Sweeper
from isomerge.alignment.streams import solve_all
from isomerge.symmetry.transform import Transform

MOST_ROUNDS = 20
STOPS_RISING = 1e-6  # of the sum, in a round


def cycle_consistent(
    pairs: Sequence[Pair], sweeper: Callable[[Pair], Sweeper], sweeps: int, order: Sequence[int]
) -> list[Transform]:
    """A transform for each model. `pairs` are the models as sources, next to the medoid; sums are in `order`."""
    layouts = pairs[0].layouts
    rows = [common_part(*(pair.source(n) for pair in pairs)) for n in layouts]
    models = [dict(zip(layouts, own, strict=True)) for own in zip(*rows, strict=True)]
    weights = sweeper(pairs[order[0]]).tensor_weights()

    def solved(targets: Sequence[Tensors]) -> tuple[list[Transform], list[Tensors]]:
        found = [
            solve_all(sweeper(replace(pair, source=own.__getitem__, anchor=target.__getitem__)), sweeps)
            for pair, own, target in zip(pairs, models, targets, strict=True)
        ]
        return found, [{n: t.act(own[n], layouts[n]) for n in layouts} for t, own in zip(found, models, strict=True)]

    best, soft = solved([{n: pairs[0].anchor(n) for n in layouts}] * len(pairs))
    here = most = _crossed(soft, soft, weights, order) / 2
    for _ in range(MOST_ROUNDS):
        sums = {n: _total(soft, n, order) for n in layouts}
        found, exact = solved([{n: (sums[n] - own[n]) / (len(soft) - 1) for n in layouts} for own in soft])
        there = _crossed(exact, exact, weights, order) / 2
        if there > most:
            best, most = found, there
        step, reached = best_step(here, _crossed(soft, exact, weights, order), there)
        soft = [between(start, end, step) for start, end in zip(soft, exact, strict=True)]
        rise, here = reached - here, reached
        if rise <= STOPS_RISING * abs(here):
            break
    return best


def _total(parts: Sequence[Tensors], name: str, order: Sequence[int]) -> Tensor:
    return torch.stack([parts[k][name] for k in order]).sum(0)


def _crossed(
    left: Sequence[Tensors], right: Sequence[Tensors], weights: Mapping[str, float], order: Sequence[int]
) -> float:
    """Σ_{p≠q} ⟨left_p, right_q⟩"""
    found = 0.0
    for name, weight in weights.items():
        own = sum(float((left[k][name] * right[k][name]).sum()) for k in order)
        found += weight * (float((_total(left, name, order) * _total(right, name, order)).sum()) - own)
    return found
