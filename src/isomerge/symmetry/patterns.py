"""Axis patterns: one readable string says which space every axis of a tensor lives in.

    "(head.0 qk.0) residual'"            rows are heads, each with its inner space; columns are read from the stream
    "[head.0 qk.0 | head.0 vo.0]"        concatenation: parts one after the other along one axis
    "(head.0 [qk.0 | vo.0'])"            … or inside each head
    "|residual|"                         moves with the units but never changes sign (a norm's gain)
    "_vocab residual"                    a leading underscore: an axis without a space, of any length
    "expert.0 residual' ffn.0"           ffn.0 is taken per expert.0: the two are worked on as one axis
    "(_four residual)"                   … or what is left of an axis beside its spaces: several copies of them

`'` marks the dual axis. A pattern is parsed once and bound to a shape once; the result lists, for every axis, its
*segments*: a product of spaces and the positions it takes on that axis. Everything else works on segments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from isomerge.errors import SpecificationError
from isomerge.symmetry.groups import Group

TOKEN = re.compile(r"\s*(\|[\w.]+\||[\w.]+'?|[()\[\]|])")


@dataclass(frozen=True)
class Atom:
    """One space on one axis. `free` axes carry no space."""

    space: str
    dual: bool = False
    unsigned: bool = False

    @property
    def free(self) -> bool:
        return self.space.startswith("_")

    def __str__(self) -> str:
        return f"|{self.space}|" if self.unsigned else self.space + "'" * self.dual


@dataclass(frozen=True)
class Product:
    factors: tuple[Node, ...]


@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Node, ...]


Node = Atom | Product | Concatenation


@dataclass(frozen=True, eq=False)
class Segment:
    """A product of spaces on part of an axis: `index` (shaped like `sizes`) says where it lies; None is all of it."""

    atoms: tuple[Atom, ...]
    sizes: tuple[int, ...]
    index: Tensor | None

    def take(self, tensor: Tensor, axis: int) -> Tensor:
        """The segment with its axis in front, split into its spaces: (*sizes, rest)."""
        moved = tensor.movedim(axis, 0)
        if self.index is not None:
            moved = moved.index_select(0, self.index.flatten().to(tensor.device))
        return moved.reshape(*self.sizes, -1)

    def put(self, target: Tensor, axis: int, values: Tensor) -> None:
        """Write a segment back into `target` (in place)."""
        moved = target.movedim(axis, 0)
        flat = values.reshape(math.prod(self.sizes), *moved.shape[1:])
        if self.index is None:
            moved.copy_(flat)
        else:
            moved.index_copy_(0, self.index.flatten().to(target.device), flat)


@dataclass(frozen=True, eq=False)
class Layout:
    """A pattern bound to a shape: the segments of every axis."""

    pattern: str
    shape: tuple[int, ...]
    axes: tuple[tuple[Segment, ...], ...]

    @cached_property
    def _spaces(self) -> frozenset[str]:
        return frozenset(a.space for axis in self.axes for segment in axis for a in segment.atoms if not a.free)

    def spaces(self) -> frozenset[str]:
        return self._spaces

    def segments_with(self, *spaces: str) -> Iterator[tuple[int, Segment]]:
        """The segments that any of these spaces is part of, with their axes."""
        for axis, segments in enumerate(self.axes):
            for segment in segments:
                if any(atom.space in spaces for atom in segment.atoms):
                    yield axis, segment

    def axis_of(self, space: str, *, dual: bool | None = None) -> int | None:
        """The first axis that is exactly this space (the whole of it), or None."""
        for number, axis in enumerate(self.axes):
            atoms = axis[0].atoms if len(axis) == 1 else ()
            if len(atoms) == 1 and atoms[0].space == space and dual in (None, atoms[0].dual):
                return number
        return None


@lru_cache(maxsize=4096)
def parse(pattern: str) -> tuple[Node, ...]:
    """The axes of a pattern.

    >>> parse("(head qk) residual'")[1]
    Atom(space='residual', dual=True, unsigned=False)
    """
    tokens, position = [], 0
    text = pattern.strip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if not match:
            raise _error(pattern, f"cannot read it from column {position + 1}: '{text[position:]}'")
        tokens.append(match.group(1))
        position = match.end()
    nodes, rest = _sequence(tokens, pattern, closing=None)
    if rest:
        raise _error(pattern, f"'{rest[0]}' closes nothing")
    return nodes


def _sequence(tokens: list[str], pattern: str, closing: str | None) -> tuple[tuple[Node, ...], list[str]]:
    """Nodes up to (not including) a closing bracket or a bar."""
    nodes: list[Node] = []
    while tokens and tokens[0] not in (")", "]", "|"):
        token, tokens = tokens[0], tokens[1:]
        if token == "(":
            inner, tokens = _sequence(tokens, pattern, ")")
            tokens = _expect(tokens, ")", pattern)
            nodes.append(_product(inner, pattern))
        elif token == "[":
            parts, tokens = _parts(tokens, pattern)
            nodes.append(Concatenation(parts))
        elif token.startswith("|"):
            nodes.append(Atom(token.strip("|"), unsigned=True))
        else:
            nodes.append(Atom(token.rstrip("'"), dual=token.endswith("'")))
    if closing is None and tokens and tokens[0] == "|":
        raise _error(pattern, "a bar is only allowed between the parts of [ … ]")
    return tuple(nodes), tokens


def _parts(tokens: list[str], pattern: str) -> tuple[tuple[Node, ...], list[str]]:
    parts = []
    while True:
        inner, tokens = _sequence(tokens, pattern, "]")
        parts.append(_product(inner, pattern))
        if tokens and tokens[0] == "|":
            tokens = tokens[1:]
            continue
        return tuple(parts), _expect(tokens, "]", pattern)


def _product(nodes: Sequence[Node], pattern: str) -> Node:
    if not nodes:
        raise _error(pattern, "an empty bracket or part")
    return nodes[0] if len(nodes) == 1 else Product(tuple(nodes))


def _expect(tokens: list[str], token: str, pattern: str) -> list[str]:
    if not tokens or tokens[0] != token:
        raise _error(pattern, f"'{token}' is missing")
    return tokens[1:]


def _error(pattern: str, cause: str) -> SpecificationError:
    return SpecificationError(
        f'Reading the axis pattern "{pattern}": {cause}. A pattern is spaces separated by blanks, one per axis; '
        "( ) nests them, [ | ] concatenates, ' marks the dual, |x| an unsigned axis, _x an axis without a space."
    )


def joined(pattern: str, spaces: Mapping[str, Group]) -> tuple[int, int, str] | None:
    """Stacked experts: an axis that another, after it, is nested in. The two axes, and the pattern with one of both.

    >>> from isomerge.symmetry.groups import Permutation
    >>> joined("expert residual' ffn", {"expert": Permutation(2), "ffn": Permutation(3, per="expert")})
    (0, 2, "residual' (expert ffn)")
    """
    nodes = parse(pattern)
    own = [{a.space for a in _atoms(node)} for node in nodes]
    for inner, names in enumerate(own):
        wanted = {p for s in names if s in spaces for p in spaces[s].per} - names
        outer = next((axis for axis in range(inner) if own[axis] & wanted), None)
        if outer is not None:
            both = Product((nodes[outer], nodes[inner]))
            left = [both if axis == inner else node for axis, node in enumerate(nodes) if axis != outer]
            return outer, inner, " ".join(map(written, left))
    return None


def _atoms(node: Node) -> Iterator[Atom]:
    if isinstance(node, Atom):
        yield node
    else:
        for part in node.factors if isinstance(node, Product) else node.parts:
            yield from _atoms(part)


def written(node: Node) -> str:
    """The text of a node, as it is parsed."""
    if isinstance(node, Product):
        return "(" + " ".join(map(written, node.factors)) + ")"
    return "[" + " | ".join(map(written, node.parts)) + "]" if isinstance(node, Concatenation) else str(node)


def bind(pattern: str, shape: Sequence[int], spaces: Mapping[str, Group], tensor: str = "") -> Layout:
    """Fit a pattern to a tensor's shape; every mismatch is an error that names the axis."""
    nodes = parse(pattern)
    if len(nodes) != len(shape):
        raise SpecificationError(
            f'Binding tensor {tensor} of shape {tuple(shape)} to "{pattern}": the pattern has {len(nodes)} axes, the '
            f"tensor {len(shape)}. The checkpoint is not of the architecture its config.json names, or is quantised."
        )
    axes = []
    for number, (node, length) in enumerate(zip(nodes, shape, strict=True)):
        whole = _whole_axis(node, length, spaces)
        if whole is not None:
            size = math.prod(whole.sizes)
            axis: tuple[Segment, ...] = (whole,)
        else:
            size, segments = _segments(node, length, spaces, pattern)
            plain = len(segments) == 1
            axis = tuple(Segment(a, tuple(i.shape), None if plain else i) for a, i in segments)
        if size != length:
            raise SpecificationError(
                f'Binding tensor {tensor} of shape {tuple(shape)} to "{pattern}": axis {number} should have {size} '
                f"entries and has {length}. config.json and the weights disagree; compare them."
            )
        for segment in axis:
            _check_parents(segment.atoms, spaces, pattern)
        axes.append(axis)
    return Layout(pattern, tuple(shape), tuple(axes))


def _whole_axis(node: Node, length: int, spaces: Mapping[str, Group]) -> Segment | None:
    """The usual axis, a space or a product of spaces: no positions to work out."""
    atoms = (node,) if isinstance(node, Atom) else node.factors if isinstance(node, Product) else ()
    if not atoms or not all(isinstance(a, Atom) and (a.free or a.space in spaces) for a in atoms):
        return None
    known = tuple(a for a in atoms if isinstance(a, Atom))
    taken = math.prod(spaces[a.space].size for a in known if not a.free)
    return Segment(known, tuple(length // taken if a.free else spaces[a.space].size for a in known), None)


def _check_parents(atoms: tuple[Atom, ...], spaces: Mapping[str, Group], pattern: str) -> None:
    before: set[str] = set()
    for atom in atoms:
        for parent in () if atom.free else spaces[atom.space].per:
            if parent not in before:
                cause = f"the space '{atom.space}' is taken per '{parent}', which must stand before it on its axis"
                raise _error(pattern, cause)
        before.add(atom.space)


def _at_most(size: int, length: int, pattern: str) -> int:
    """Before positions are written out: config.json can name any size."""
    if size > length:
        raise SpecificationError(
            f'Binding "{pattern}": a part of an axis of {length} entries should have {size}. config.json and the '
            "weights disagree; compare them."
        )
    return size


def _segments(
    node: Node, length: int, spaces: Mapping[str, Group], pattern: str
) -> tuple[int, list[tuple[tuple[Atom, ...], Tensor]]]:
    """Size of a node and its segments, as (atoms, positions shaped by the atoms' sizes)."""
    if isinstance(node, Atom):
        if not node.free and node.space not in spaces:
            raise _error(pattern, f"the space '{node.space}' is not declared (write _{node.space} if it has none)")
        size = length if node.free else spaces[node.space].size
        return _at_most(size, length, pattern), [((node,), torch.arange(size))]
    if isinstance(node, Concatenation):
        offset, placed = 0, []
        for part in node.parts:
            size, segments = _segments(part, length, spaces, pattern)
            placed += [(atoms, index + offset) for atoms, index in segments]
            offset += size
        return offset, placed
    size, placed = 1, [((), torch.zeros((), dtype=torch.int64))]
    for factor in node.factors:
        inner, segments = _segments(factor, length, spaces, pattern)
        _at_most(size * inner, length, pattern)
        placed = [
            (left + atoms, index.reshape(*index.shape, *[1] * position.ndim) * inner + position)
            for left, index in placed
            for atoms, position in segments
        ]
        size *= inner
    return size, placed
