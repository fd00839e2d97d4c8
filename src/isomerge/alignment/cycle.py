"""Cycle-consistent matching: every pair of models at once, through one common space.

Maximised is Σ_{p<q} ⟨g_p·B_p, g_q·B_q⟩: not how near each model is to one, but how near all are to each other. Model p
is taken to q by g_q⁻¹ g_p, so going round a cycle of models always ends where it began.

This is Frank–Wolfe. Soft models S_p, convex combinations of moved ones, start next to the medoid. Every model is then
solved against the mean of all *others*, which is the gradient; all move towards what was found by the step
that is best on the line, and the best of the exact transforms on the way is the result.

Reference: Crisostomi et al., "C²M³: Cycle-consistent multi-model merging" (NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair, common_part
from isomerge.alignment.graph_matching import best_step
from isomerge.alignment.rounds import Sweeper
from isomerge.symmetry.transform import Transform

MOST_ROUNDS = 20
STOPS_RISING = 1e-6
Tensors = dict[str, Tensor]


def cycle_consistent(
    pairs: Sequence[Pair], sweeper: Callable[[Pair], Sweeper], sweeps: int, order: Sequence[int]
) -> list[Transform]:
    """A transform for each model. `pairs` are the models as sources, next to the medoid; sums are in `order`."""
    layouts = pairs[0].layouts
    names = list(layouts)
    rows = zip(*(common_part(*(pair.source(n) for pair in pairs)) for n in names), strict=True)
    models = [dict(zip(names, row, strict=True)) for row in rows]
    weights = sweeper(pairs[order[0]]).tensor_weights()

    def solved(targets: Sequence[Mapping[str, Tensor]]) -> list[Transform]:
        both = zip(pairs, models, targets, strict=True)
        return [
            sweeper(Pair(own.__getitem__, target.__getitem__, layouts, pair.architecture)).solve(sweeps)
            for pair, own, target in both
        ]

    def moved(transforms: Sequence[Transform]) -> list[Tensors]:
        return [{n: t.act(own[n], layouts[n]) for n in names} for t, own in zip(transforms, models, strict=True)]

    def total(parts: Sequence[Tensors], name: str) -> Tensor:
        return torch.stack([parts[k][name] for k in order]).sum(0)

    def crossed(left: Sequence[Tensors], right: Sequence[Tensors]) -> float:
        """Σ_{p≠q} ⟨left_p, right_q⟩"""
        found = 0.0
        for name, weight in weights.items():
            own = sum(float((left[k][name] * right[k][name]).sum()) for k in order)
            found += weight * (float((total(left, name) * total(right, name)).sum()) - own)
        return found

    anchor = {n: pairs[0].anchor(n) for n in names}
    best = solved([anchor] * len(pairs))
    soft = moved(best)
    here = most = crossed(soft, soft) / 2
    for _ in range(MOST_ROUNDS):
        sums = {n: total(soft, n) for n in names}
        found = solved([{n: (sums[n] - own[n]) / (len(soft) - 1) for n in names} for own in soft])
        exact = moved(found)
        there = crossed(exact, exact) / 2
        if there > most:
            best, most = found, there
        step, reached = best_step(here, crossed(soft, exact), there)
        soft = [{n: torch.lerp(s[n], e[n], step) for n in names} for s, e in zip(soft, exact, strict=True)]
        rise, here = reached - here, reached
        if rise <= STOPS_RISING * abs(here):
            break
    return best
