"""The founding paper's rescaling (equations 11–12): one factor per head, after the rotation.

With rotary positions the factor is one modulus per frequency, solved together with the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.evidence import Pair
from isomerge.alignment.solvers.by_group import SOLVERS
from isomerge.symmetry.groups import Group, Rotary
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

BLOCK = 1024
"""Numbers solved at once: each takes some 30 kB meanwhile, so that memory does not grow with the model."""


def rescaled_all(pair: Pair, solved: Transform, run: Run) -> Transform:
    """Every continuous element of a transform with its best scale: a·R, or r·phase per rotary pair."""
    spaces = pair.architecture.spaces
    wanted = [s for s in solved.elements if SOLVERS[spaces[s].name].rescale]
    sums = dict(zip(wanted, run(lambda s: _sums(pair, s, solved.elements[s]), wanted), strict=True))
    batches: dict[Any, list[str]] = {}
    for space in wanted:
        batches.setdefault(SOLVERS[spaces[space].name].rescale, []).append(space)
    scaled = dict(solved.elements)
    for rescale, members in batches.items():
        for space, scale in _together(rescale, {s: sums[s] for s in members}, run).items():
            # A rotary solver gives the whole number, phase and modulus; others the factor of a rotation.
            scaled[space] = scale if scale.is_complex() else solved.elements[space] * scale[:, None, None]
    return Transform(solved.spaces, scaled)


def _together(solve: Callable[..., Tensor], sums: Mapping[str, Sequence[Tensor]], run: Run) -> dict[str, Tensor]:
    """The numbers of all spaces in common blocks: a space has few of them, and solving takes hundreds of steps."""
    sides = [torch.cat([part.flatten() for part in side]) for side in zip(*sums.values(), strict=True)]
    blocks = list(zip(*(side.split(BLOCK) for side in sides), strict=True))
    sizes = [own[0].numel() for own in sums.values()]
    solved = torch.cat(run(lambda block: solve(*block), blocks)).split(sizes)
    return {s: part.reshape(own[0].shape) for (s, own), part in zip(sums.items(), solved, strict=True)}


def _sums(pair: Pair, space: str, element: Tensor) -> list[Tensor]:
    """What the scale of every head of a space depends on: ‖Q_B‖², ⟨Q_B, Q_A⟩, ⟨K_B, K_A⟩, ‖K_B‖², B rotated."""
    group = pair.architecture.spaces[space]
    moved = Transform(pair.architecture.spaces, {space: element})
    sums: dict[bool, list[Tensor]] = {False: [], True: []}  # by side: [‖source‖², ⟨source, anchor⟩]
    for name in pair.touching([space]):
        source, anchor = (t.double() for t in pair.tensors(name))
        for axis, segment in pair.layouts[name].segments_with(space):
            left, right = segment.take(source, axis), segment.take(anchor, axis)
            if group.element != "pairs":  # phases are solved again, with their moduli
                left = moved.act_on_segment(left, segment)
            side = sums[segment.atoms[-1].dual]
            terms = _terms(group, left, right)
            side[:] = terms if not side else [a + b for a, b in zip(side, terms, strict=True)]
    (forward, forward_cross), (dual, dual_cross) = sums[False], sums[True]
    return [t.cpu() for t in (forward.real, forward_cross, dual_cross, dual.real)]


def _terms(group: Group, left: Tensor, right: Tensor) -> list[Tensor]:
    """‖left‖² and ⟨left, right⟩ per head: values are (head, [query], inner, rest)."""
    if isinstance(group, Rotary):
        z, w = group.pairs(left), group.pairs(right)  # (head, [query], pair, rest)
        square, product = (z * z.conj()).sum(-1), (z * w.conj()).sum(-1)
        return [t.reshape(t.shape[0], -1, t.shape[-1]).sum(1) for t in (square, product)]
    flat, other = left.reshape(left.shape[0], -1), right.reshape(right.shape[0], -1)
    return [torch.sum(flat * flat, -1), torch.sum(flat * other, -1)]
