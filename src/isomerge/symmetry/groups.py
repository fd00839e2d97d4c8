"""The groups a space can carry: what may be done to its units without changing the function of the model.

A group is a value: its size (units of the space) and the parent spaces it is taken *per* (one element for each of
their units). Its elements are plain tensors with the parents' sizes as leading axes, so they can be stored, batched
and moved to a device like any other tensor:

| group | element | action on x |
|---|---|---|
| Permutation | int64 (…, n) | y[j] = x[p[j]] |
| SignedPermutation | int64 (…, n), ±(index+1) | y[j] = sign·x[index] |
| Rotation, RotationFixingOnes, Invertible | float64 (…, n, n) | y = g x |
| Rotary | complex128 (…, n/2) | one complex number per rotary pair |
| Scale, SignedScale, Signs | float64 (…, n) | y = s x |

An axis marked `'` transforms by the dual g⁻ᵀ. Permutations and rotations are their own dual.

What a group is, it declares; nothing asks for its class. The table in `alignment/solvers/by_group.py` says which solver
serves which group.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from isomerge.errors import SpecificationError

TOLERANCE = 1e-8  # how far from the group an element may lie (all solves are in float64)
Self = TypeVar("Self", bound="Group")
GROUPS: dict[str, type[Group]] = {}
"""Every group by its name, entered where its class is defined."""


@dataclass(frozen=True)
class Group(ABC):
    """A symmetry of one space. `size` counts its units, `per` names the spaces it has one element each for."""

    size: int
    per: tuple[str, ...] = ()
    name: ClassVar[str]
    element: ClassVar[str]
    """How an element is stored: "order", "matrix", "pairs" (complex numbers), "factor" or "nothing"."""
    movable: ClassVar[bool] = True
    """It has more elements than the identity."""
    reorders: ClassVar[bool] = False
    """Units change places."""
    signed: ClassVar[bool] = False
    """Units may change sign, each by itself."""
    rotates: ClassVar[bool] = False
    """Any orthogonal matrix, or every one that fixes some vector: continuous, and its own dual."""
    fixes_ones: ClassVar[bool] = False
    """The vector of ones stays as it is."""

    @property
    def balanced(self) -> bool:
        """It has sizes to choose, which balancing the two factors fixes before the rest is solved."""
        return False

    def __init_subclass__(cls) -> None:
        GROUPS[cls.name] = cls

    def __post_init__(self) -> None:
        if isinstance(self.per, str):
            object.__setattr__(self, "per", (self.per,))

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Continuous dimension of one element."""

    @abstractmethod
    def identity(self, batch: Sequence[int] = ()) -> Tensor: ...

    @abstractmethod
    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor: ...

    @abstractmethod
    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        """Move x of shape (*batch, size, rest)."""

    @abstractmethod
    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        """The element that does `first`, then `second`."""

    @abstractmethod
    def inverse(self, element: Tensor) -> Tensor: ...

    @abstractmethod
    def contains(self, element: Tensor) -> bool: ...

    def dual(self, element: Tensor) -> Tensor:
        """g⁻ᵀ; orthogonal groups are their own dual."""
        return element

    def order(self, element: Tensor) -> Tensor | None:
        """Where each unit comes from, for groups that move units; None where units keep their place."""
        return None

    def moves_units(self, element: Tensor) -> bool:
        """Whether an element changes the place or the sign of a unit: more than noise could ask for."""
        return self.reorders and not self.is_identity(element)

    def is_identity(self, element: Tensor) -> bool:
        return torch.equal(element, self.identity(element.shape[: len(self.per)]).to(element.device))

    def restricted(self: Self, kind: type[Group] | None) -> Group:
        """The same space with another (smaller) group; None leaves only the identity."""
        return Trivial(self.size, self.per) if kind is None else kind(self.size, self.per)


@dataclass(frozen=True)
class Trivial(Group):
    """Only the identity: a space that must stay as it is."""

    name: ClassVar[str] = "identity"
    element: ClassVar[str] = "nothing"
    movable: ClassVar[bool] = False
    dimension: ClassVar[int] = 0

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return torch.ones(*batch, 1, dtype=torch.float64)

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        return self.identity(batch)

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        return x

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def contains(self, element: Tensor) -> bool:
        return bool((element == 1).all())


@dataclass(frozen=True)
class Permutation(Group):
    """Every order of the units (hidden units of a GELU layer, attention heads, experts)."""

    name: ClassVar[str] = "permutation"
    element: ClassVar[str] = "order"
    reorders: ClassVar[bool] = True
    dimension: ClassVar[int] = 0

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return torch.arange(self.size).expand(*batch, self.size).contiguous()

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.rand(*batch, self.size, generator=generator, dtype=torch.float64).argsort(-1)

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        if element.ndim == 1:
            return x.index_select(-2, element)
        return torch.take_along_dim(x, element[..., None], dim=-2)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(-1, second)

    def inverse(self, element: Tensor) -> Tensor:
        return element.argsort(-1)

    def contains(self, element: Tensor) -> bool:
        expected = torch.arange(self.size, device=element.device).expand_as(element)
        return element.dtype == torch.int64 and torch.equal(element.sort(-1).values, expected)

    def order(self, element: Tensor) -> Tensor | None:
        return element


@dataclass(frozen=True)
class SignedPermutation(Group):
    """Every order of the units with a free sign each (tanh units, a residual stream under RMSNorm gains)."""

    name: ClassVar[str] = "signed permutation"
    element: ClassVar[str] = "order"
    reorders: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    dimension: ClassVar[int] = 0

    @staticmethod
    def encode(order: Tensor, sign: Tensor) -> Tensor:
        return (order + 1) * sign.to(torch.int64)

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return (torch.arange(self.size) + 1).expand(*batch, self.size).contiguous()

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        order = torch.rand(*batch, self.size, generator=generator, dtype=torch.float64).argsort(-1)
        return self.encode(order, torch.randint(0, 2, order.shape, generator=generator) * 2 - 1)

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        moved = torch.take_along_dim(x, (element.abs() - 1)[..., None], dim=-2)
        return moved if unsigned else moved * element.sign()[..., None].to(x.dtype)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(-1, second.abs() - 1) * second.sign()

    def inverse(self, element: Tensor) -> Tensor:
        order = (element.abs() - 1).argsort(-1)
        return self.encode(order, element.sign().gather(-1, order))

    def contains(self, element: Tensor) -> bool:
        return Permutation(self.size).contains(element.abs() - 1) and bool((element != 0).all())

    def order(self, element: Tensor) -> Tensor | None:
        return element.abs() - 1


@dataclass(frozen=True)
class Invertible(Group):
    """Every invertible matrix: the inner space of a head, met by one factor as g and by the other as g⁻ᵀ."""

    name: ClassVar[str] = "invertible"
    element: ClassVar[str] = "matrix"

    @property
    def balanced(self) -> bool:
        return not self.rotates

    @property
    def dimension(self) -> int:
        return self.size**2

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return torch.eye(self.size, dtype=torch.float64).expand(*batch, self.size, self.size).contiguous()

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        """Well conditioned (singular values in [½, 2]), so that a test of exactness tests the symmetry alone."""
        left, right = (random_orthogonal(self.size, batch, generator) for _ in range(2))
        scale = 2 ** (2 * torch.rand(*batch, self.size, generator=generator, dtype=torch.float64) - 1)
        return left * scale[..., None, :] @ right

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        if unsigned:
            if bool((x == x[..., :1, :]).all()):
                return x  # a folded gain: the same for every unit
            raise SpecificationError(
                f"Applying a {self.name} of size {self.size}: an unsigned axis (a norm's gain) does not move under it. "
                "Fold the gain into its readers first (the canonical form does)."
            )
        matrix = self.dual(element) if dual else element
        if x.dtype == matrix.dtype or matrix.ndim == 2 or x.device.type != "cpu":
            return (matrix @ x.to(matrix.dtype)).to(x.dtype)
        return _multiplied_by_head(matrix, x)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second @ first

    def inverse(self, element: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.inv(element)
        return inverse

    def dual(self, element: Tensor) -> Tensor:
        return self.inverse(element).mT

    def contains(self, element: Tensor) -> bool:
        if not torch.isfinite(element).all():
            return False
        values = torch.linalg.svdvals(element)
        return bool((values[..., -1] > 1e-12 * values[..., 0]).all())


@dataclass(frozen=True)
class Rotation(Invertible):
    """Every orthogonal matrix (reflections included), e.g. of a residual stream under RMSNorm."""

    name: ClassVar[str] = "rotation"
    rotates: ClassVar[bool] = True

    @property
    def dimension(self) -> int:
        return self.size * (self.size - 1) // 2

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        return random_orthogonal(self.size, batch, generator)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT

    def dual(self, element: Tensor) -> Tensor:
        return element

    def contains(self, element: Tensor) -> bool:
        gram = element @ element.mT
        return bool((gram - torch.eye(self.size, dtype=gram.dtype, device=gram.device)).abs().max() <= TOLERANCE)


@dataclass(frozen=True)
class RotationFixingOnes(Rotation):
    """Orthogonal matrices with g·1 = 1: what commutes with the centring inside a LayerNorm."""

    name: ClassVar[str] = "rotation fixing 1"
    fixes_ones: ClassVar[bool] = True

    @property
    def dimension(self) -> int:
        return (self.size - 1) * (self.size - 2) // 2

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        basis = ones_first_basis(self.size)
        inner = torch.zeros(*batch, self.size, self.size, dtype=torch.float64)
        inner[..., 0, 0] = 1
        inner[..., 1:, 1:] = random_orthogonal(self.size - 1, batch, generator)
        return basis @ inner @ basis.mT

    def contains(self, element: Tensor) -> bool:
        return super().contains(element) and bool((element.sum(-1) - 1).abs().max() <= TOLERANCE)


@dataclass(frozen=True)
class Rotary(Group):
    """What commutes with rotary positions: one complex number per frequency.

    `layout` says which coordinates form a pair: "half" (j, j + n/2) or "interleaved" (2j, 2j+1). `phase` is "any",
    "sign" (norms on q and k leave only ±1) or "none"; `scale` says whether the modulus is free.
    """

    layout: str = "half"
    phase: str = "any"
    scale: bool = True
    name: ClassVar[str] = "rotary"
    element: ClassVar[str] = "pairs"

    @property
    def balanced(self) -> bool:
        return self.scale

    def moves_units(self, element: Tensor) -> bool:
        return self.phase == "sign" and bool((element.real < 0).any())

    @property
    def dimension(self) -> int:
        return self.size // 2 * ((self.phase == "any") + self.scale)

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return torch.ones(*batch, self.size // 2, dtype=torch.complex128)

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        shape = (*batch, self.size // 2)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        turns = {"any": uniform * 2, "sign": (uniform > 0.5).double(), "none": uniform * 0}
        angle = turns[self.phase] * torch.pi
        modulus = 2 ** (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
        element = torch.polar(modulus if self.scale else torch.ones_like(modulus), angle)
        return element if self.phase == "any" else element.real.to(torch.complex128)

    def pairs(self, x: Tensor) -> Tensor:
        """Rows of x (…, n, rest) read as complex numbers (…, n/2, rest)."""
        if self.layout == "half":
            first, second = x.chunk(2, dim=-2)
        else:
            first, second = x[..., 0::2, :], x[..., 1::2, :]
        return torch.complex(first.contiguous(), second.contiguous())

    def unpair(self, z: Tensor) -> Tensor:
        if self.layout == "half":
            return torch.cat([z.real, z.imag], dim=-2)
        return torch.stack([z.real, z.imag], dim=-2).flatten(-3, -2)

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        number = (self.dual(element) if dual else element)[..., None]
        return self.unpair(self.pairs(x.to(number.real.dtype)) * number).to(x.dtype)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def inverse(self, element: Tensor) -> Tensor:
        return 1 / element

    def dual(self, element: Tensor) -> Tensor:
        return 1 / element.conj()

    def contains(self, element: Tensor) -> bool:
        modulus = element.abs()
        good = bool(torch.isfinite(modulus).all() and (modulus > 0).all())
        if not self.scale:
            good = good and bool((modulus - 1).abs().max() <= TOLERANCE)
        if self.phase != "any":
            good = good and bool(element.imag.abs().max() == 0)
        return good and (self.phase != "none" or bool((element.real > 0).all()))


@dataclass(frozen=True)
class SignedScale(Group):
    """A non-zero factor per unit, of either sign (the `up` half of a gated feed-forward)."""

    name: ClassVar[str] = "signed scale"
    element: ClassVar[str] = "factor"
    signed: ClassVar[bool] = True

    @property
    def balanced(self) -> bool:
        return True

    def moves_units(self, element: Tensor) -> bool:
        return bool((element < 0).any())

    @property
    def dimension(self) -> int:
        return self.size

    def identity(self, batch: Sequence[int] = ()) -> Tensor:
        return torch.ones(*batch, self.size, dtype=torch.float64)

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        size = 2 ** (2 * torch.rand(*batch, self.size, generator=generator, dtype=torch.float64) - 1)
        return size * (torch.randint(0, 2, size.shape, generator=generator) * 2 - 1)

    def act(self, element: Tensor, x: Tensor, *, dual: bool = False, unsigned: bool = False) -> Tensor:
        return x * (self.dual(element) if dual else element)[..., None].to(x.dtype)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def inverse(self, element: Tensor) -> Tensor:
        return 1 / element

    def dual(self, element: Tensor) -> Tensor:
        return 1 / element

    def contains(self, element: Tensor) -> bool:
        return bool(torch.isfinite(element).all() and (element != 0).all())


@dataclass(frozen=True)
class Scale(SignedScale):
    """A positive factor per unit (ReLU units)."""

    name: ClassVar[str] = "scale"
    signed: ClassVar[bool] = False

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        return super().random(batch, generator).abs()

    def contains(self, element: Tensor) -> bool:
        return super().contains(element) and bool((element > 0).all())


@dataclass(frozen=True)
class Signs(SignedScale):
    """A sign per unit (units between a norm and a product with units that have the same sign)."""

    name: ClassVar[str] = "signs"

    @property
    def dimension(self) -> int:
        return 0

    @property
    def balanced(self) -> bool:
        return False

    def random(self, batch: Sequence[int], generator: torch.Generator) -> Tensor:
        return super().random(batch, generator).sign()

    def contains(self, element: Tensor) -> bool:
        return super().contains(element) and bool((element.abs() == 1).all())


def _multiplied_by_head(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix @ x in float64, rounded once, without a float64 copy of x: one head at a time stays in the cache."""
    result = torch.empty_like(x)  # keeps the layout of x, so a transposed view comes back as one
    across = x.stride(-1) != 1
    wide, product = (torch.empty(x.shape[-2:][:: -1 if across else 1], dtype=torch.float64) for _ in range(2))
    for slot in itertools.product(*map(range, matrix.shape[:-2])):
        if across:
            torch.mm(wide.copy_(x[slot].mT), matrix[slot].mT, out=product)
            result[slot].mT.copy_(product)
        else:
            torch.mm(matrix[slot], wide.copy_(x[slot]), out=product)
            result[slot].copy_(product)
    return result


def random_orthogonal(size: int, batch: Sequence[int], generator: torch.Generator) -> Tensor:
    """Haar-distributed: the sign fix makes the QR factor unique, hence uniform."""
    q, r = torch.linalg.qr(torch.randn(*batch, size, size, generator=generator, dtype=torch.float64))
    haar: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return haar


def ones_first_basis(size: int) -> Tensor:
    """An orthogonal matrix whose first column is 1/√n (a Householder reflection of e₁)."""
    v = torch.full((size,), size**-0.5, dtype=torch.float64)
    v[0] -= 1
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.eye(size, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v)
