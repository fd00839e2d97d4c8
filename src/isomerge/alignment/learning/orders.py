"""Orders that learn, straight through: a gradient changes scores, and their best assignment is what acts.

Forward, units stand in the order that the scores give, P = assign(X). Backward, P is taken for S(X / T), the doubly
stochastic matrix of Sinkhorn's rounds, which turns into P as the temperature T falls: so a pair gains only what the
pairs beside it lose. Scores start as the cosines of the units' weights, so that units which could take each other's
place need less persuasion. (Bengio et al. 2013 and, for merging, Git Re-Basin's third algorithm; Mena et al. 2018.)

Units that may change sign, or carry a scale of either sign, come with the sign in which the pair fits best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isomerge.alignment.learning.parameters import LearnedElement
from isomerge.alignment.solvers.assignment import assign_batch
from isomerge.symmetry.groups import Group, SignedPermutation
from isomerge.symmetry.patterns import Layout, Segment
from isomerge.symmetry.transform import batch_sizes

LARGEST = 4096
"""Units of a space whose order may learn: scores are that number squared, and so is the work of assigning them."""
ROUNDS = 12
"""Of Sinkhorn: rows and columns divided by their sums, in turn."""
HOT, COLD = 0.1, 0.01
"""Temperatures of the first and the last step."""
AT_ONCE = 256
"""Units of which the order is assigned again at every step; of more, in proportion, at fewer."""
LIFTS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
Ends = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class LearnedOrder(LearnedElement):
    """`mirrored` names the spaces nested in this one that take the sign of a pair."""

    def __init__(
        self, group: Group, batch: Sequence[int], device: str, cosines: Cosines, mirrored: Sequence[str]
    ) -> None:
        super().__init__(group, batch, device)
        self.mirrored = frozenset(mirrored)
        self.temperature = HOT
        self.sign = cosines.signed.sign() + (cosines.signed == 0)  # (…, source, place)
        signed = group.signed or bool(mirrored)
        start = cosines.plain + (cosines.signed.abs() if signed else cosines.signed)
        self.order = torch.arange(group.size, device=device).expand(*batch, group.size).contiguous()
        self.parameters["scores"].data.copy_(self._at_home(start))

    def _at_home(self, scores: Tensor) -> Tensor:
        """Scores that leave every unit in its place: the sweep may have seen more than cosines."""
        one = torch.eye(self.group.size, device=scores.device)
        return next(lifted for lift in LIFTS if self._keeps_places(lifted := scores + lift * one) or lift == LIFTS[-1])

    def _keeps_places(self, scores: Tensor) -> bool:
        return torch.equal(self._assigned(scores), self.order)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"scores": (self.group.size, self.group.size)}

    @torch.no_grad()
    def settle(self) -> None:
        """The order that the scores now give."""
        self.order = self._assigned(self.parameters["scores"].detach())

    def _assigned(self, scores: Tensor) -> Tensor:
        order, _ = assign_batch(scores.reshape(-1, *scores.shape[-2:]).cpu().double())
        return order.reshape(*self.batch, self.group.size).to(self.device)

    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        """(…, place, source): one where a unit comes from, with the gradient of Sinkhorn's matrix everywhere."""
        scores = values["scores"].mT
        hard = torch.zeros_like(scores).scatter_(-1, self.order[..., None], 1.0)
        if not torch.is_grad_enabled():
            return hard
        soft: Tensor = checkpoint(sinkhorn, scores / self.temperature, use_reentrant=False)
        return hard + soft - soft.detach()

    def step(self, number: int, steps: int, *, look: bool) -> None:
        """After a gradient step: a lower temperature, and the order that the scores now give."""
        self.temperature = HOT * (COLD / HOT) ** (number / steps)
        if look or number % max(1, self.group.size // AT_ONCE) == 0:
            self.settle()

    def apply(self, element: Tensor, x: Tensor, *, dual: bool, signed: bool = False) -> Tensor:
        return (element * self.sign.mT if signed else element) @ x

    def signs(self) -> Tensor:
        """Of the pairs that were chosen: (…, place)."""
        return torch.take_along_dim(self.sign.mT, self.order[..., None], dim=-1)[..., 0]

    @torch.no_grad()
    def exact(self) -> Tensor:
        order = self.order.cpu()
        return SignedPermutation.encode(order, self.signs().cpu()) if self.group.signed else order


def sinkhorn(scores: Tensor) -> Tensor:
    """The doubly stochastic matrix that is e^scores with rows and columns scaled.

    >>> sinkhorn(torch.tensor([[0.0, 2.0], [0.0, 0.0]])).round(decimals=2)
    tensor([[0.2700, 0.7300],
            [0.7300, 0.2700]])
    """
    for _ in range(ROUNDS):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


class Cosines:
    """How alike the units of a space are in both models: (…, source, place), by what has a sign and what has none."""

    def __init__(self, spaces: Mapping[str, Group], space: str, layouts: Mapping[str, Layout], ends: Ends) -> None:
        group = spaces[space]
        rows: dict[bool, tuple[list[Tensor], list[Tensor]]] = {False: ([], []), True: ([], [])}
        for name in ends[0]:
            for axis, segment in layouts[name].segments_with(space):
                signed = takes_sign(spaces, space, segment)
                for side, tensors in zip(rows[signed], ends, strict=True):
                    side.append(_units(group, space, segment, segment.take(tensors[name], axis)))
        both = [torch.cat([*rows[False][k], *rows[True][k]], -1).norm(dim=-1) for k in (0, 1)]
        size = (both[1][..., :, None] * both[0][..., None, :]).clamp_min(1e-30)
        zero = torch.zeros(*batch_sizes(spaces, space), group.size, group.size, device=size.device)
        self.plain, self.signed = (
            torch.cat(source, -1) @ torch.cat(anchor, -1).mT / size if source else zero
            for anchor, source in (rows[False], rows[True])
        )


def takes_sign(spaces: Mapping[str, Group], space: str, segment: Segment) -> bool:
    """Whether the sign of a unit counts on this segment: its own, or that of a scale nested in it."""
    own = [atom for atom in segment.atoms if atom.space == space]
    inner = [spaces[a.space] for a in segment.atoms if not a.free and space in spaces[a.space].per]
    return (spaces[space].signed and not own[0].unsigned) or any(g.signed and g.element == "factor" for g in inner)


def _units(group: Group, space: str, segment: Segment, values: Tensor) -> Tensor:
    """(*sizes, rest) -> (*parents, units, everything else)"""
    place = next(k for k, atom in enumerate(segment.atoms) if atom.space == space)
    parents = [k for k in range(place) if segment.atoms[k].space in group.per]
    order = [*parents, place, *(k for k in range(values.ndim) if k not in (*parents, place))]
    moved = values.permute(order)
    return moved.reshape(*moved.shape[: len(parents) + 1], -1)
