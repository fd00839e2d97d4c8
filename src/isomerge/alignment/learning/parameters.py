"""Elements that learn: what a gradient may change of each space, around the identity.

| group | parameters | element |
|---|---|---|
| rotation (fixing 1) | M, S = M − Mᵀ (centred on both sides) | Cayley, (I − S/2)⁻¹ (I + S/2): orthogonal for every M |
| invertible | M | I + M |
| rotary | log-modulus and phase, as far as they are free | exp(a + ib) |
| scale, signed scale | a | exp(a): signs stay |
| permutation | see `orders.py` | |

Every one starts at the identity: what the sweep found is already in the weights that they act on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isomerge.symmetry.groups import Group, Rotary


class LearnedElement(ABC):
    """The element of one space, as a function of the parameters that learn."""

    def __init__(self, group: Group, batch: Sequence[int], device: str) -> None:
        self.group, self.batch, self.device = group, tuple(batch), device
        self.parameters = {name: self._zeros(*shape) for name, shape in self.shapes().items()}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*self.batch, *shape, device=self.device).requires_grad_()

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What learns, without the sizes of the parents."""

    @abstractmethod
    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        """The element for these values of the parameters, in their precision."""

    @abstractmethod
    def apply(self, element: Tensor, x: Tensor, *, dual: bool) -> Tensor:
        """Move x of shape (*batch, size, rest) in the precision of x."""

    def now(self) -> Tensor:
        return self.element(self.parameters)

    @torch.no_grad()
    def exact(self) -> Tensor:
        """In float64, on the CPU."""
        return self.element({name: value.detach().cpu().double() for name, value in self.parameters.items()})


class LearnedRotation(LearnedElement):
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"turn": (self.group.size, self.group.size)}

    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        turn = values["turn"]
        if self.group.fixes_ones:  # S·1 = 0, so that every rotation made of S keeps 1
            turn = turn - turn.mean(-1, keepdim=True)
            turn = turn - turn.mean(-2, keepdim=True)
        half = (turn - turn.mT) / 2
        one = torch.eye(self.group.size, dtype=turn.dtype, device=turn.device)
        solved: Tensor = torch.linalg.solve_ex(one - half, one + half)[0]  # never singular: no need to wait and see
        return solved

    def apply(self, element: Tensor, x: Tensor, *, dual: bool) -> Tensor:
        return element @ x


class LearnedInvertible(LearnedElement):
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"change": (self.group.size, self.group.size)}

    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        change = values["change"]
        return torch.eye(self.group.size, dtype=change.dtype, device=change.device) + change

    def apply(self, element: Tensor, x: Tensor, *, dual: bool) -> Tensor:
        return torch.linalg.solve_ex(element.mT, x)[0] if dual else element @ x


class LearnedRotary(LearnedElement):
    group: Rotary

    def shapes(self) -> dict[str, tuple[int, ...]]:
        free = {"modulus": self.group.scale, "phase": self.group.phase == "any"}
        return {name: (self.group.size // 2,) for name, is_free in free.items() if is_free}

    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        some = next(iter(values.values()))
        modulus, phase = (values.get(name, torch.zeros_like(some)) for name in ("modulus", "phase"))
        if "phase" not in values:
            return modulus.exp().to(torch.complex128 if modulus.dtype == torch.float64 else torch.complex64)
        return torch.polar(modulus.exp(), phase)

    def apply(self, element: Tensor, x: Tensor, *, dual: bool) -> Tensor:
        number = (self.group.dual(element) if dual else element)[..., None]
        return self.group.unpair(self.group.pairs(x) * number)


class LearnedScale(LearnedElement):
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"size": (self.group.size,)}

    def element(self, values: Mapping[str, Tensor]) -> Tensor:
        return values["size"].exp()

    def apply(self, element: Tensor, x: Tensor, *, dual: bool) -> Tensor:
        factor = element[..., None]
        return x / factor if dual else x * factor


KINDS: dict[str, Callable[[Group, Sequence[int], str], LearnedElement]] = {
    "rotation": LearnedRotation,
    "rotation fixing 1": LearnedRotation,
    "invertible": LearnedInvertible,
    "rotary": LearnedRotary,
    "scale": LearnedScale,
    "signed scale": LearnedScale,
}
"""What learns, by the name of its group."""
