"""Evidence: cross-covariances between two models for one space, with everything around it already moved.

A block is the product of source and anchor along one segment: its atoms say which spaces it speaks about, its tensor
is (pairs, *source sizes, *anchor sizes). Blocks with the same signature add up.

Noise tells siblings from strangers. It lets a group of dimension k gain about k/n of the squared distance of n
parameters, *if* it is the same for every parameter. A fine-tune changes a bias and a table by very different amounts,
so each tensor is measured in units of its own change, `w = n / ‖A − B‖²`; a plain or size-weighted sum lets one short
vector pass for a whole layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from isomerge.errors import AlignmentError
from isomerge.symmetry.architecture import Architecture
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout, Segment
from isomerge.symmetry.transform import Transform, dimension

Provider = Callable[[str], Tensor]
Evidence = tuple[Tensor, Tensor | None]  # cross-covariance, and what the sign of a unit does not touch
LARGE = 1024  # units from which a cross-covariance is worth keeping in one copy
ROWS = 512
BLOCKS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Numbers compared at once: as many as fit a processor's cache, or keep an accelerator busy."""
LEAST_CHANGE = 1e-10  # of the squared size: a tensor that hardly changed counts as much as one that changed by this


@dataclass(frozen=True)
class Block:
    """Cross-covariance over `spaces`: value of shape (pairs, *sizes of the source, *sizes of the anchor)."""

    spaces: tuple[str, ...]
    unsigned: bool
    value: Tensor

    @property
    def depth(self) -> int:
        return len(self.spaces)


@dataclass(frozen=True)
class Pair:
    """Two models to compare: the source (already canonical) and the anchor, by tensor name."""

    source: Provider
    anchor: Provider
    layouts: dict[str, Layout]
    architecture: Architecture
    rough: bool = False
    """For sweeps that are followed by another one: sums need not be wider than the tensors."""

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Both tensors, cut to their common size along axes without a space (position tables may differ in length)."""
        source, anchor = common_part(self.source(name), self.anchor(name))
        return source, anchor

    def touching(self, spaces: Iterable[str]) -> list[str]:
        """The names of tensors that live in any of the spaces, in the order of the layouts."""
        return [name for _, name in sorted({place for space in spaces for place in self._places.get(space, ())})]

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, str]]]:
        places: dict[str, list[tuple[int, str]]] = {}
        for place in enumerate(self.layouts):
            for space in self.layouts[place[1]].spaces():
                places.setdefault(space, []).append(place)
        return places


def common_part(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors cut to the size they share along each axis."""
    if len({t.shape for t in tensors}) == 1:
        return tensors
    if len({t.ndim for t in tensors}) > 1:
        shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
        raise AlignmentError(f"Comparing tensors of shapes {shapes}: ranks differ.")
    shared = tuple(slice(0, min(sizes)) for sizes in zip(*(t.shape for t in tensors), strict=True))
    return tuple(t[shared] for t in tensors)


def unit_blocks(
    pair: Pair, unit: frozenset[str], around: Transform, *, diagonal: bool, unsolved: Collection[str] = ()
) -> list[Block]:
    """Blocks of a unit (a root space and all nested in it). `diagonal` keeps only root unit h with root unit h.

    What depends on `unsolved` spaces of other units is left out.
    """
    sums: dict[tuple[tuple[str, ...], bool], Tensor] = {}
    for name in pair.touching(unit):
        source, anchor = pair.tensors(name)
        layout = pair.layouts[name]
        source = around.act(source, layout, skip=unit)
        for axis, segment in layout.segments_with(*unit):
            if unsolved and not met_beside(layout, axis, segment).isdisjoint(unsolved):
                continue
            spaces = tuple(a.space for a in segment.atoms)
            key = (spaces, any(a.unsigned for a in segment.atoms))
            if not unit.issuperset(spaces):
                own = tuple(a for a in segment.atoms if a.space in unit)
                left, right = (_own_first(segment, unit, tensor, axis) for tensor in (source, anchor))
                key = (tuple(a.space for a in own), any(a.unsigned for a in own))
                value = _product(left, right, left.shape[:-1], diagonal=diagonal)
                sums[key] = value if key not in sums else sums[key].add_(value)
                continue
            if not diagonal and len(segment.sizes) == 1 and segment.sizes[0] >= LARGE:
                precision = source.dtype if pair.rough else torch.float64
                _add_large(sums, key, segment.take(source, axis), segment.take(anchor, axis), precision)
                continue
            if diagonal and is_shared(spaces[1:], pair.architecture.spaces):
                key, value = (spaces[:1] + spaces[2:], key[1]), _shared_cross(segment, source, anchor, axis)
            else:
                value = cross(segment, source, anchor, axis, diagonal=diagonal)
            sums[key] = value if key not in sums else sums[key].add_(value)
    return [Block(spaces, unsigned, value) for (spaces, unsigned), value in sums.items()]


def add_blocks(blocks: Iterable[Block]) -> list[Block]:
    """Blocks over the same spaces added up."""
    sums: dict[tuple[tuple[str, ...], bool], Tensor] = {}
    for block in blocks:
        key = (block.spaces, block.unsigned)
        sums[key] = sums[key] + block.value if key in sums else block.value
    return [Block(spaces, unsigned, value) for (spaces, unsigned), value in sums.items()]


def weight_bounds(pair: Pair, unit: frozenset[str]) -> dict[tuple[str, ...], float]:
    """What the weights of a unit could earn at most, Σ ‖B‖‖A‖, by the spaces of a block."""
    bounds: dict[tuple[str, ...], float] = {}
    for name in pair.touching(unit):
        tensors = pair.tensors(name)
        for axis, segment in pair.layouts[name].segments_with(*unit):
            spaces = tuple(a.space for a in segment.atoms)
            source, anchor = (segment.take(t, axis).double().norm() for t in tensors)
            bounds[spaces] = bounds.get(spaces, 0.0) + float(source * anchor)
    return bounds


def of_one_root(value: Tensor, depth: int) -> Tensor:
    """(1, *sizes, *sizes) -> (root, *inner, *inner): only root unit h with root unit h."""
    return value[0].diagonal(dim1=0, dim2=depth).movedim(-1, 0)


def _add_large(sums: dict[Any, Tensor], key: Any, left: Tensor, right: Tensor, precision: torch.dtype) -> None:
    """Add left · rightᵀ to a sum, some rows at a time: only one n × n matrix is ever alive."""
    n = len(left)
    if key not in sums:
        sums[key] = torch.zeros(1, n, n, dtype=precision, device=left.device)
    for rows in torch.arange(n).split(ROWS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        sums[key][0, part] += left[part] @ right.mT


def cross(segment: Segment, source: Tensor, anchor: Tensor, axis: int, *, diagonal: bool = False) -> Tensor:
    """Source × anchor along a segment: (1, *sizes, *sizes), or (root, *inner, *inner) when only the diagonal counts."""
    return _product(segment.take(source, axis), segment.take(anchor, axis), segment.sizes, diagonal=diagonal)


def _product(left: Tensor, right: Tensor, sizes: Sequence[int], *, diagonal: bool) -> Tensor:
    if diagonal and len(sizes) > 1:
        root, inner = sizes[0], sizes[1:]
        n = math.prod(inner)
        product = torch.bmm(left.reshape(root, n, -1), right.reshape(root, n, -1).mT)
        return product.reshape(root, *inner, *inner)
    n = math.prod(sizes)
    left, right = left.reshape(n, -1), right.reshape(n, -1)
    if diagonal:
        return (left * right).sum(-1)  # (root,)
    return (left @ right.mT).reshape(1, *sizes, *sizes)


def _own_first(segment: Segment, unit: frozenset[str], tensor: Tensor, axis: int) -> Tensor:
    """A segment's values with the spaces of other units, which have moved already, among what is summed over."""
    values = segment.take(tensor, axis)
    own = [k for k, atom in enumerate(segment.atoms) if atom.space in unit]
    others = [k for k in range(values.ndim) if k not in own]
    return values.permute([*own, *others]).reshape(*(segment.sizes[k] for k in own), -1)


def met_beside(layout: Layout, axis: int, segment: Segment) -> set[str]:
    """The spaces that evidence from one segment depends on besides: those of the other axes, and all of its own."""
    others = [s for number, segments in enumerate(layout.axes) if number != axis for s in segments]
    return {atom.space for other in (segment, *others) for atom in other.atoms}


def is_shared(spaces: Sequence[str], groups: Mapping[str, Group]) -> bool:
    """Whether the units of the first space keep their places and share the second: query heads of one key head."""
    return (
        len(spaces) > 1
        and spaces[0] in groups
        and not groups[spaces[0]].movable
        and spaces[0] not in groups[spaces[1]].per
    )


def _shared_cross(segment: Segment, source: Tensor, anchor: Tensor, axis: int) -> Tensor:
    """(root, *inner, *inner) where query heads share: each with itself, added up. Pairs of them are never compared."""
    flat = Segment(segment.atoms[1:], (math.prod(segment.sizes[:2]), *segment.sizes[2:]), segment.index)
    product = cross(flat, source, anchor, axis, diagonal=True)
    return product.reshape(*segment.sizes[:2], *product.shape[1:]).sum(1)


def stream_cross(pair: Pair, name: str, around: Transform, space: str) -> tuple[Tensor, bool] | None:
    """Source × anchor along the residual axis of one tensor, and whether that axis is unsigned.

    None for a tensor with the space on both axes: it is quadratic in the element and stays out of the objective.
    """
    layout = pair.layouts[name]
    places = list(layout.segments_with(space))
    if len({axis for axis, _ in places}) != 1:
        return None
    source, anchor = pair.tensors(name)
    source = around.act(source, layout, skip={space})
    products = [_along_stream(segment, source, anchor, axis, space) for axis, segment in places]
    return reduce(operator.add, products), any(atom.unsigned for _, segment in places for atom in segment.atoms)


def _along_stream(segment: Segment, source: Tensor, anchor: Tensor, axis: int, space: str) -> Tensor:
    """Source × anchor along the stream of a segment, (n, n); what else the axis has (patches, say) is summed over."""
    if len(segment.atoms) == 1:
        return cross(segment, source, anchor, axis)[0]
    place = next(k for k, atom in enumerate(segment.atoms) if atom.space == space)
    left, right = (segment.take(t, axis).movedim(place, 0).reshape(segment.sizes[place], -1) for t in (source, anchor))
    return left @ right.mT


class EvidenceSum:
    """Evidence for the stream, as it is added up."""

    def __init__(self, size: int) -> None:
        self.C = torch.zeros(size, size, dtype=torch.float64)
        self.unsigned: Tensor | None = None

    def add(self, value: Tensor, weight: float, apart: bool) -> None:
        """`apart` is what a sign does not touch."""
        if not apart:
            self.C.add_(value, alpha=weight)
        elif self.unsigned is None:
            self.unsigned = value.double() * weight
        else:
            self.unsigned.add_(value, alpha=weight)

    @property
    def evidence(self) -> Evidence:
        return self.C, self.unsigned


def added_evidence(parts: Iterable[Evidence]) -> Evidence:
    signed, apart = zip(*parts, strict=True)
    unsigned = [part for part in apart if part is not None]
    return reduce(operator.add, signed), reduce(operator.add, unsigned) if unsigned else None


# --- what noise alone explains ----------------------------------------------------------------------------------------
def squared_distance(tensor: Tensor, other: Tensor | None = None) -> float:
    """‖tensor − other‖², or ‖tensor‖², in float64 and part by part.

    >>> squared_distance(torch.tensor([3.0, 4.0])), squared_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
    (25.0, 4.0)
    """
    block = BLOCKS.get(tensor.device.type, BLOCKS["cuda"])
    parts = [each.flatten().split(block) for each in (tensor, other) if each is not None]
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for some in zip(*parts, strict=True):
        values = some[0].double() if other is None else some[0].double() - some[1].double()
        total += values @ values
    return float(total)


def distance_weight(source: Tensor, anchor: Tensor, least: float = LEAST_CHANGE) -> float:
    """The weight of a tensor's squared distance that makes it one per parameter; 0 for a tensor of zeros."""
    size = squared_distance(anchor) + squared_distance(source)
    return anchor.numel() / max(squared_distance(source, anchor), least * size) if size > 0 else 0.0


def is_noise(gain: float, dimension: int, parameters: int) -> bool:
    """Whether a gain (the fall of Σ w ‖A − B‖², w from `distance_weight`) is no more than noise explains.

    Twice its expected value k; for a group of few dimensions four standard deviations above it (a χ² of k degrees).
    A gain of more than three quarters of everything is never noise, or a single head could not be recovered.

    >>> is_noise(150, 100, 10_000), is_noise(250, 100, 10_000), is_noise(8, 3, 24)
    (True, False, True)
    """
    limit = max(2 * dimension, dimension + 4 * math.sqrt(2 * dimension))
    return gain <= min(limit, 0.75 * parameters) if dimension else gain <= 0


def only_noise(spaces: Mapping[str, Group], space: str, moves: Iterable[tuple[Tensor, ...]]) -> bool:
    """Whether a space gains no more than noise by an element, given each tensor before, after and in the anchor."""
    gain, parameters = 0.0, 0
    for start, moved, target in moves:
        fall = float((start - target).square().sum() - (moved - target).square().sum())
        gain += distance_weight(start, target) * fall
        parameters += target.numel()
    return is_noise(gain, dimension(spaces, space), parameters)
