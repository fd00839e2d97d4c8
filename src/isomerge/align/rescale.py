"""The founding paper's rescaling (equations 11–12): one factor per head, after the rotation.

With rotary positions the factor is one modulus per frequency, solved together with the phase.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.align import solvers
from isomerge.align.evidence import Pair
from isomerge.align.parallel import Run
from isomerge.symmetry.groups import Group, Permutation, Rotary
from isomerge.symmetry.transform import Transform


def rescaled(pair: Pair, space: str, element: Tensor) -> Tensor:
    """The element of a per-head space with its best scale: a·R, or r·phase per rotary pair."""
    group = pair.architecture.spaces[space]
    moved = Transform(pair.architecture.spaces, {space: element})
    sums: dict[bool, list[Tensor]] = {False: [], True: []}  # by side: [‖source‖², ⟨source, anchor⟩]
    for name in pair.touching([space]):
        source, anchor = (t.double() for t in pair.tensors(name))
        for axis, segments in enumerate(pair.layouts[name].axes):
            for segment in segments:
                if segment.atoms[-1].space != space:
                    continue
                left, right = segment.take(source, axis), segment.take(anchor, axis)
                if not isinstance(group, Rotary):
                    left = moved.act_on_segment(left, segment)
                side = sums[segment.atoms[-1].dual]
                terms = _terms(group, left, right)
                side[:] = terms if not side else [a + b for a, b in zip(side, terms, strict=True)]
    (forward, forward_cross), (dual, dual_cross) = sums[False], sums[True]
    if isinstance(group, Rotary):
        return solvers.rotary_scaled(forward_cross, dual_cross, forward.real, dual.real).cpu()
    scale = solvers.head_scale(forward, forward_cross, dual_cross, dual, signed=True).cpu()
    return element * scale[:, None, None]


def rescaled_all(pair: Pair, found: Transform, run: Run) -> Transform:
    """Every continuous element of a transform with its best scale."""
    wanted = [s for s in found.elements if not isinstance(pair.architecture.spaces[s], Permutation)]
    scaled = run(lambda space: rescaled(pair, space, found.elements[space]), wanted)
    return Transform(found.spaces, {**found.elements, **dict(zip(wanted, scaled, strict=True))})


def _terms(group: Group, left: Tensor, right: Tensor) -> list[Tensor]:
    """‖left‖² and ⟨left, right⟩ per head: values are (head, [query], inner, rest)."""
    if isinstance(group, Rotary):
        z, w = group.pairs(left), group.pairs(right)  # (head, [query], pair, rest)
        square, product = (z * z.conj()).sum(-1), (z * w.conj()).sum(-1)
        return [t.reshape(t.shape[0], -1, t.shape[-1]).sum(1) for t in (square, product)]
    flat, other = left.reshape(left.shape[0], -1), right.reshape(right.shape[0], -1)
    return [torch.sum(flat * flat, -1), torch.sum(flat * other, -1)]
