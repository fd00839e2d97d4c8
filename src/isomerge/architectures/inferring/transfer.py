"""What is proven of a tiny model, written for the real one: the same names, other sizes.

A layer takes the patterns of a tiny layer with the same tensors, the number of heads comes from config.json, and every
other size follows from the shapes. Sizes that do not follow are not guessed: their spaces stay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isomerge.architectures.inferring.tiny import size_of
from isomerge.symmetry.architecture import Architecture, Norm
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Atom, Concatenation, Node, parse
from isomerge.symmetry.transform import dimension

Shapes = Mapping[str, tuple[int, ...]]
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Untransferable(Exception):
    """Why a specification of a tiny model does not fit the real one."""


def transfer(
    tiny: Architecture, small: Shapes, small_config: Mapping[str, Any], shapes: Shapes, config: Mapping[str, Any]
) -> Architecture:
    """The specification of a tiny model for tensors of these shapes."""
    partner = dict(_partners(small, shapes, tiny))
    tensors: dict[str, str] = {}
    spaces: dict[str, Group] = {}
    names: dict[str, str] = {}
    for name in shapes:
        if name not in partner:
            raise Untransferable(f"no tensor of the tiny model is like {name}")
        renamed = _renaming(partner[name], name)
        pattern = _mapped(tiny.tensors[partner[name]], lambda s, r=renamed, n=name: _own_still(r(s), n))
        tensors[name], names[partner[name]] = pattern, name
        for space in _spaces(tiny.tensors[partner[name]]):
            group = tiny.spaces[space]
            spaces[_own_still(renamed(space), name)] = replace(group, per=tuple(renamed(p) for p in group.per))
    sizes = _sizes(tensors, spaces, shapes, _heads(small_config, config))
    known = {name: _resized(group, sizes[name]) for name, group in spaces.items()}
    norms = [n for norm in tiny.norms if isinstance(norm, Norm) for n in _norms(norm, partner, tensors)]
    writers = tuple(name for name in shapes if partner[name] in set(tiny.writers))
    return replace(tiny, spaces=known, tensors=tensors, norms=norms, writers=writers)


# --- which tiny tensor is like which ----------------------------------------------------------------------------------
def _partners(small: Shapes, shapes: Shapes, tiny: Architecture) -> Iterator[tuple[str, str]]:
    """For every tensor one of the tiny model: of a layer with the same tensors, of the same expert or the first.

    Layers with the same tensors may still differ (one has rotary positions, one has none): the smallest groups hold
    for all.
    """
    kinds = {_layer(n) for n in small}
    signatures = {key: _signature(key, small) for key in kinds if key is not None}
    for key in {_layer(n) for n in shapes}:
        members = [n for n in shapes if _layer(n) == key]
        if key is None:
            yield from ((n, n) for n in members if n in small)
            continue
        stem = key[0]
        same = [k for k, s in signatures.items() if k[0] == stem and s == _signature(key, shapes)]
        if not same:
            continue
        chosen = min(same, key=lambda k: (_freedom(k, tiny), k != key, k[1]))
        for name in members:
            rest = name[len(f"{stem}{key[1]}") :]
            for candidate in (rest, NUMBER.sub("0", rest)):
                if f"{stem}{chosen[1]}{candidate}" in small:
                    yield name, f"{stem}{chosen[1]}{candidate}"
                    break


def _freedom(layer: tuple[str, int], tiny: Architecture) -> int:
    """The continuous dimension of what moves in a layer of the tiny model."""
    head = f"{layer[0]}{layer[1]}."
    spaces = {s for name, pattern in tiny.tensors.items() if name.startswith(head) for s in _spaces(pattern)}
    return sum(dimension(tiny.spaces, space) for space in spaces if space in tiny.spaces)


def _layer(name: str) -> tuple[str, int] | None:
    match = NUMBER.search(name)
    return (name[: match.start()], int(match.group())) if match else None


def _signature(key: tuple[str, int], shapes: Shapes) -> frozenset[str]:
    head = f"{key[0]}{key[1]}."
    return frozenset(NUMBER.sub("#", n[len(head) :]) for n in shapes if n.startswith(head))


def _renaming(tiny: str, real: str) -> Any:
    """Numbers of a space's name: the last is the layer, those before it stand further down in the tensor's name."""
    old, new = NUMBER.findall(tiny), NUMBER.findall(real)

    def renamed(space: str) -> str:
        numbers = list(NUMBER.finditer(space))
        if not old:
            return space
        wanted = [*new[1:], new[0]] if new else []
        if len(numbers) == len(wanted) and [m.group() for m in numbers] == [*old[1:], old[0]]:
            values = iter(wanted)
        elif new and numbers and numbers[-1].group() == old[0]:
            values = iter([*(m.group() for m in numbers[:-1]), new[0]])
        else:
            return space
        return NUMBER.sub(lambda _: next(values), space)

    return renamed


def _own_still(space: str, tensor: str) -> str:
    return f"{space}_{re.sub(r'[^a-zA-Z0-9]', '_', tensor)}" if re.fullmatch(r"still\d+", space) else space


def _mapped(pattern: str, change: Any) -> str:
    return re.sub(r"(?<![\w.])[A-Za-z][\w.]*", lambda m: change(m.group()), pattern)


def _spaces(pattern: str) -> list[str]:
    return re.findall(r"(?<![\w.])[A-Za-z][\w.]*", pattern)


def _norms(norm: Norm, partner: Mapping[str, str], tensors: Mapping[str, str]) -> Iterator[Norm]:
    for name, like in partner.items():
        if like == norm.name + ".weight":
            layer = _layer(name)
            readers = tuple(
                n for n, k in partner.items()
                if k in norm.readers and (layer is None or _layer(n) in (layer, None))
            )  # fmt: skip
            yield replace(norm, name=name.removesuffix(".weight"), readers=readers)


# --- sizes ------------------------------------------------------------------------------------------------------------
def _resized(group: Group, size: int) -> Group:
    return replace(group, size=size)


def _heads(small: Mapping[str, Any], config: Mapping[str, Any]) -> dict[tuple[str, int], set[int]]:
    """What the config says where the tiny one says so many heads, groups of them, or rotary coordinates."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(small.get(key), Mapping):
            for known, values in _heads(small[key], value).items():
                found[known] |= values
        elif type(value) is int and type(small.get(key)) is int and size_of(key) in ("heads", "groups", "rotary"):
            found[size_of(key), small[key]].add(value)
    return found


def _sizes(
    tensors: Mapping[str, str], spaces: Mapping[str, Group], shapes: Shapes, heads: Mapping[tuple[str, int], set[int]]
) -> dict[str, int]:
    """The size of every space, from the lengths of the axes it stands on."""
    equations = [
        (node, length) for name, pattern in tensors.items()
        for node, length in zip(parse(pattern), shapes[name], strict=True)
    ]  # fmt: skip
    sizes = {name: 1 for name, group in spaces.items() if group.size == 1 and not name.startswith("still")}
    _eliminate(equations, sizes)
    outer = [s for s in spaces if re.search(r"(^|\.)(head|kv)\.\d+$", s) and s not in sizes]
    rotary = {v for (kind, _), values in heads.items() if kind == "rotary" for v in values}
    for space in outer:
        near = [e for e in equations if space in _names(e[0])]
        query = {n for node, _ in near for n in _names(node) if re.search(r"(^|\.)query\.\d+$", n)}
        groups = spaces[space].size
        count = groups * math.prod(spaces[n].size for n in query)
        wanted = heads.get(("heads", count), set()) or heads.get(("groups", count), set())
        found = list(_solutions(space, spaces, near, sizes, wanted, heads.get(("groups", groups), wanted), rotary))
        if not found or any(f != found[0] for f in found):
            raise Untransferable(f"the sizes of {space} do not follow from config.json")
        sizes |= found[0]
        _eliminate(equations, sizes)
    if missing := sorted(s for s in spaces if s not in sizes):
        raise Untransferable(f"the size of {missing[0]} does not follow from the shapes")
    if any(_total(node, sizes) not in (None, length) for node, length in equations):
        raise Untransferable("the shapes contradict each other")
    return sizes


def _solutions(
    space: str, spaces: Mapping[str, Group], equations: Sequence[tuple[Node, int]], sizes: Mapping[str, int],
    heads: set[int], groups: set[int], rotary: set[int],
) -> Iterator[dict[str, int]]:  # fmt: skip
    names = {n for node, _ in equations for n in _names(node)}
    query = next((n for n in names if re.search(r"(^|\.)query\.\d+$", n)), None)
    turning = next((n for n in names if re.search(r"(^|\.)rotary\.\d+$", n)), None)
    plain = next((n for n in names if turning and re.search(r"(^|\.)qk\.\d+$", n)), None)
    for count, parts in itertools.product(sorted(heads), sorted(groups if query else {0})):
        if query and (count % parts or parts > count):
            continue
        trial = dict(sizes) | ({space: parts, query: count // parts} if query else {space: count})
        widths: list[int | float] = [*sorted(rotary)] if rotary else []
        if turning and plain and not widths:
            widths = [spaces[turning].size / (spaces[turning].size + spaces[plain].size)]
        for width in widths if turning else [0]:
            now = dict(trial)
            if turning and plain:
                inner = _inner(equations, now, turning, plain)
                if inner is None:
                    continue
                now[turning] = round(inner * width) if isinstance(width, float) else width
                now[plain] = inner - now[turning]
            _eliminate(equations, now)
            complete = all(n in now and now[n] > 0 for n in names)
            if complete and all(_total(node, now) == length for node, length in equations):
                yield now


def _inner(equations: Sequence[tuple[Node, int]], sizes: Mapping[str, int], turning: str, plain: str) -> int | None:
    """Coordinates of a head, rotary or not, from an axis that has nothing else unknown."""
    for node, length in equations:
        names = _names(node)
        if turning in names and all(n in sizes or n in (turning, plain) for n in names):
            for inner in range(2, length + 1):
                if _total(node, {**sizes, turning: inner - 1, plain: 1}) == length:
                    return inner
    return None


def _eliminate(equations: Sequence[tuple[Node, int]], sizes: dict[str, int]) -> None:
    """Every axis with a single unknown size gives it."""
    while True:
        before = len(sizes)
        for node, length in equations:
            unknown = {n for n in _names(node) if n not in sizes}
            if len(unknown) == 1:
                name = unknown.pop()
                zero, one = (_total(node, {**sizes, name: k}) or 0 for k in (0, 1))
                if one > zero and (length - zero) % (one - zero) == 0:
                    sizes[name] = (length - zero) // (one - zero)
        if len(sizes) == before:
            return


def _names(node: Node) -> list[str]:
    if isinstance(node, Atom):
        return [] if node.free else [node.space]
    inner = node.parts if isinstance(node, Concatenation) else node.factors
    return [name for part in inner for name in _names(part)]


def _total(node: Node, sizes: Mapping[str, int]) -> int | None:
    """The length of an axis; None for a free one."""
    if isinstance(node, Atom):
        return None if node.free else sizes.get(node.space, 0)
    inner = [_total(p, sizes) for p in (node.parts if isinstance(node, Concatenation) else node.factors)]
    if isinstance(node, Concatenation):
        return sum(n or 0 for n in inner)
    product = 1
    for n in inner:
        product *= n or 0
    return product
