"""Everything that learns, together: at every step a move of tensors with gradients, at the end exact elements."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from isomerge.alignment.learning.gains import LearnedGains
from isomerge.alignment.learning.orders import LARGEST, Cosines, Ends, LearnedOrder, takes_sign
from isomerge.alignment.learning.parameters import KINDS, LearnedElement
from isomerge.alignment.learning.path_model import Move
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Atom, Layout, Segment
from isomerge.symmetry.transform import Transform, batch_sizes


@dataclass(frozen=True)
class CurrentTransform(Transform):
    """A transform whose elements are those of one step, in the precision of the weights."""

    learned: Mapping[str, LearnedElement] = field(default_factory=dict)

    def _acted(self, element: Tensor, x: Tensor, atom: Atom, segment: Segment) -> Tensor:
        one = self.learned[atom.space]
        if isinstance(one, LearnedOrder):
            return one.apply(element, x, dual=atom.dual, signed=takes_sign(self.spaces, atom.space, segment))
        if atom.unsigned:
            return x  # a folded gain: the same for every unit
        return one.apply(element, x, dual=atom.dual)


class LearnedTransform:
    """Elements of the spaces in `moving`, all at the identity to begin with.

    What has other spaces inside (heads) keeps its order: its inner elements belong to the places that units arrive at.
    """

    def __init__(
        self,
        spaces: Mapping[str, Group],
        moving: Collection[str],
        layouts: Mapping[str, Layout],
        ends: Ends,
        device: str,
        gains: LearnedGains | None = None,
    ) -> None:
        self.spaces, self.layouts, self.gains = spaces, layouts, gains
        self.learned: dict[str, LearnedElement] = {}
        for space in sorted(moving):
            group, batch = spaces[space], batch_sizes(spaces, space)
            if group.name in KINDS:
                one = KINDS[group.name](group, batch, device)
                if one.parameters:
                    self.learned[space] = one
            elif group.reorders and group.size <= LARGEST and (inner := self._scales_in(space, moving)) is not None:
                signed = [name for name in inner if spaces[name].signed]
                cosines = Cosines(spaces, space, layouts, ends)
                self.learned[space] = LearnedOrder(group, batch, device, cosines, signed)

    def _scales_in(self, space: str, moving: Collection[str]) -> list[str] | None:
        """The spaces inside this one; None where one of them is more than a scale per unit, or stays."""
        inner = [name for name, group in self.spaces.items() if space in group.per]
        fits = all(self.spaces[n].element == "factor" and self.spaces[n].size == 1 and n in moving for n in inner)
        return inner if fits else None

    @property
    def orders(self) -> dict[str, LearnedOrder]:
        return {space: one for space, one in self.learned.items() if isinstance(one, LearnedOrder)}

    def parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Space, name and tensor of everything that learns."""
        for space, one in self.learned.items():
            for name, tensor in one.parameters.items():
                yield space, name, tensor
        if self.gains is not None:
            for norm, tensor in self.gains.parameters.items():
                yield norm, "gain", tensor

    def now(self) -> Move:
        """As the parameters are now; what is needed for several tensors is computed once."""
        transform = CurrentTransform(self.spaces, {s: one.now() for s, one in self.learned.items()}, self.learned)
        gains = self.gains
        factors = {} if gains is None else gains.factors()

        def move(name: str, tensor: Tensor) -> Tensor:
            moved = transform.act(tensor, self.layouts[name])
            return moved if gains is None else gains.act(name, moved, factors)

        return move

    def exact(self) -> Transform:
        """In float64. Scales take the signs of the pairs that their units were put together in."""
        elements = {space: one.exact() for space, one in self.learned.items()}
        for order in self.orders.values():
            for space in order.mirrored:
                elements[space] = elements[space] * order.signs().cpu().double()[..., None]
        return Transform(self.spaces, elements)

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for *_, tensor in self.parameters()]

    def restore(self, state: Sequence[Tensor]) -> None:
        for (*_, tensor), value in zip(self.parameters(), state, strict=True):
            tensor.data.copy_(value)
        for order in self.orders.values():
            order.settle()
