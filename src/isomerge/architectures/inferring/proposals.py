"""From units to proposals: for every attention, hidden layer and stream its patterns, and the groups to try."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from isomerge.architectures.inferring.patterns import Place, Role, describe_axis, still_sizes
from isomerge.architectures.inferring.units import Axis, Heads, Units, UnitSpace
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.groups import (
    Group,
    Invertible,
    Permutation,
    Rotary,
    Rotation,
    Scale,
    SignedPermutation,
    SignedScale,
    Trivial,
)

STILL = "still"


@dataclass
class Proposal:
    """One part of a model: patterns of single axes, and for every space the groups to try, largest first."""

    kind: str  # attention, ffn, residual or head
    where: str
    axes: dict[Axis, str]
    options: dict[str, tuple[Group, ...]]
    notes: list[str] = field(default_factory=list)

    def spaces(self, proven: Mapping[str, Group]) -> dict[str, Group]:
        groups = {}
        for space, (first, *_) in self.options.items():
            groups[space] = proven.get(space) or Trivial(first.size, first.per)
        for pattern in self.axes.values():
            for size in re.findall(r"\bstill(\d+)\b", pattern):
                groups[STILL + size] = Trivial(int(size))
        return groups


class Proposals:
    """All proposals of one traced model; every axis on disk stands in one of them at most."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.state = units.sandbox.state
        self.notes: list[str] = []
        self.used: set[str] = set()

    def all(self) -> list[list[Proposal]]:
        """For every part its alternatives, the likeliest first."""
        found = [list(self._attention(heads)) for heads in self.units.attentions]
        spaces = [s for s in self.units.spaces() if not s.pinned and s.size > 1 and len(s.labels) > 1]
        stream = self._stream(spaces)
        for space in spaces:
            found.append(list(self._residual(space)) if space is stream else list(self._hidden(space)))
        return [alternatives for alternatives in found if alternatives]

    # --- attention -----------------------------------------------------------------------------------------------
    def _attention(self, heads: Heads) -> Iterator[Proposal]:
        layer, word = self._layer(heads.sink[0])
        prefix = self._free(word, f"head.{layer}", f"kv.{layer}")
        outer, query = f"{prefix}head.{layer}", ""
        options: dict[str, tuple[Group, ...]] = {outer: (Permutation(heads.groups),)}
        if heads.shared > 1:
            outer, query = f"{prefix}kv.{layer}", f"{prefix}query.{layer} "
            options = {outer: (Permutation(heads.groups),), query.strip(): (Permutation(heads.shared, per=(outer,)),)}
        per = (outer,)
        vo, inner = f"{prefix}vo.{layer}", heads.widths["q"]
        options[vo] = (
            Invertible(heads.inner, per=per), Rotation(heads.inner, per=per), SignedPermutation(heads.inner, per=per),
            Permutation(heads.inner, per=per),
        )  # fmt: skip
        wider = inner - heads.widths["k"]
        for key, extra in inner_spaces(prefix, layer, heads.widths["k"], per):
            dual = re.sub(r"([\w.]+\.\d+)", r"\1'", key)
            if wider and "[" in key:
                continue
            yield from self._laid_out(
                heads, f"[{key} | {STILL}{wider}]" if wider else key, dual, options | extra, outer, query, vo
            )
            if wider:
                yield from self._laid_out(heads, f"[{STILL}{wider} | {key}]", dual, options | extra, outer, query, vo)

    def _laid_out(
        self, heads: Heads, key: str, dual: str, options: dict[str, tuple[Group, ...]], outer: str, query: str, vo: str
    ) -> Iterator[Proposal]:
        """An attention whose query coordinates are `key` and whose key coordinates are `dual`."""
        g, r, e, inner = heads.groups, heads.shared, heads.inner, heads.widths["q"]
        q_sizes = (g, r) if r > 1 else (g,)
        roles = {
            "q": Role((*q_sizes, inner), f"({outer} {query}{key})", f"({query}{key})" if query else key, outer),
            "k": Role((g, heads.widths["k"]), f"({outer} {dual})", dual, outer),
            "v": Role((g, e), f"({outer} {vo})", vo, outer),
            "g": Role((*q_sizes, e), f"({outer} {query}{vo})", f"({query}{vo})" if query else vo, outer),
            "o": Role((*q_sizes, e), f"({outer} {query}{vo}')", "", outer),
        }
        axes = self._patterns(heads.labels, roles, squeeze=r == 1)
        if axes is None:
            self.notes.append(f"attention before {heads.sink[0]}: its rows are laid out in no known way")
            return
        yield Proposal("attention", heads.sink[0], axes, options)

    def _patterns(
        self, labels: Mapping[Axis, Mapping[int, Place]], roles: Mapping[str, Role], *, squeeze: bool = False
    ) -> dict[Axis, str] | None:
        axes = {}
        for (name, axis), places in labels.items():
            row: list[Place | None] = [places.get(k) for k in range(self.state[name].shape[axis])]
            if squeeze:  # one query head per key: no axis for it
                row = [(p[0], (p[1][0], *p[1][2:])) if p and p[0] in "qgo" else p for p in row]
            still = {size: f"{STILL}{size}" for size in still_sizes(row)}
            pattern = describe_axis(row, roles, still)
            if pattern is None:
                return None
            axes[name, axis] = pattern
        return axes

    # --- hidden units --------------------------------------------------------------------------------------------
    def _hidden(self, space: UnitSpace) -> Iterator[Proposal]:
        names = sorted(axis[0] for axis in space.labels)
        sink = next((a[0] for a in sorted(space.sinks)), names[0])
        layer, word = self._layer(sink)
        inside = space.size > 1 and len({self._layer(n)[0] for n in names}) == 1 and layer >= 0
        if inside:
            prefix = self._free(word, f"ffn.{layer}")
            unit, scale = f"{prefix}ffn.{layer}", f"{prefix}up.{layer}"
        else:
            unit = self._free_name("units." + re.sub(r"\W+|_?\d+", "_", sink.removesuffix(".weight")).strip("_"))
            scale = unit + ".scale"
        kind = "ffn" if inside else "head"
        occurrences = self._occurrences(space)
        sources = sorted({o for (axis, o) in occurrences if axis in space.sources})
        groups: tuple[Group, ...] = (SignedPermutation(space.size), Permutation(space.size))
        if inside or len(sources) > 1:
            groups = (Permutation(space.size),)
        writers = [(axis, o) for axis, o in occurrences if axis in space.sources and self.state[axis[0]].ndim > 1]
        plans: list[tuple[Axis, int] | None] = [*writers[::-1], None] if space.sinks and not space.gains else [None]
        for plan in plans:
            axes = self._hidden_axes(space, unit, scale, plan)
            if axes is None:
                self.notes.append(f"units of {sink}: laid out in no known way")
                return
            options: dict[str, tuple[Group, ...]] = {unit: groups}
            if plan is not None:
                options[scale] = (SignedScale(1, per=(unit,)), Scale(1, per=(unit,)))
            yield Proposal(kind, sink, axes, options)

    def _occurrences(self, space: UnitSpace) -> list[tuple[Axis, int]]:
        """Axes with how often each unit stands on them: (axis, 0), (axis, 1) for gate and up in one tensor."""
        return [
            (axis, number) for axis, places in sorted(space.labels.items())
            for number in range(-(-len(places) // space.size))
        ]  # fmt: skip

    def _hidden_axes(
        self, space: UnitSpace, unit: str, scale: str, plan: tuple[Axis, int] | None
    ) -> dict[Axis, str] | None:
        axes = {}
        for axis, places in space.labels.items():
            sink = axis in space.sinks
            mark = f"|{unit}|" if axis in space.gains else unit + "'" * sink
            roles = {}
            for number in range(-(-len(places) // space.size)):
                scaled = plan is not None and (sink or (self._same_source(axis, plan[0]) and number == plan[1]))
                text = f"({mark} {scale}{chr(39) * sink})" if scaled else mark
                inside = f"{scale}{chr(39) * sink}" if scaled else f"{STILL}1"
                roles[str(number)] = Role((space.size,), text, inside, unit)
            labels = _numbered(places)
            row: list[Place | None] = [labels.get(k) for k in range(self.state[axis[0]].shape[axis[1]])]
            still = {size: f"{STILL}{size}" for size in still_sizes(row)}
            pattern = describe_axis(row, roles, still)
            if pattern is None:
                return None
            axes[axis] = pattern
        return axes

    def _same_source(self, axis: Axis, planned: Axis) -> bool:
        """The planned weight, or its bias."""
        stem = re.sub(r"([._])?(weight|bias)$", "", axis[0])
        return axis == planned or (
            self.state[axis[0]].ndim < self.state[planned[0]].ndim and stem == re.sub(r"([._])?weight$", "", planned[0])
        )

    # --- the residual stream -------------------------------------------------------------------------------------
    def _stream(self, spaces: list[UnitSpace]) -> UnitSpace | None:
        """What most tensors write to and read."""
        wide = [s for s in spaces if s.sources and s.sinks]
        return max(wide, key=lambda s: len(s.labels), default=None)

    def _residual(self, space: UnitSpace) -> Iterator[Proposal]:
        axes = self._hidden_axes(space, RESIDUAL, "", None)
        if axes is None:
            self.notes.append("residual stream: its units are laid out in no known way")
            return
        groups: tuple[Group, ...] = (SignedPermutation(space.size), Permutation(space.size))
        yield Proposal("residual", "residual stream", axes, {RESIDUAL: groups})

    # --- names ---------------------------------------------------------------------------------------------------
    def _layer(self, name: str) -> tuple[int, str]:
        """The number of the layer in a tensor's name, and a word for its part of the model."""
        match = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
        stem = re.sub(r"\.?(weight|bias)$", "", name)
        word = re.sub(r"\W+", "_", re.sub(r"(^|\.)\d+(?=\.|$)", "", stem)).strip("_") + "."
        if match is None:
            return -1, word
        rest = re.findall(r"(?<=\.)\d+(?=\.)", name[match.end() :])
        return int(match.group(1)), word + "".join(f"{n}." for n in rest)

    def _free(self, word: str, *names: str) -> str:
        inner = re.search(r"\.\d+\.$", word)  # one of several in its layer: an expert, a block
        prefix = word if inner or any(n in self.used for n in names) else ""
        while any(prefix + n in self.used for n in names):
            prefix = "x" + prefix
        self.used |= {prefix + n for n in names}
        return prefix

    def _free_name(self, name: str) -> str:
        while name in self.used:
            name += "_"
        self.used.add(name)
        return name


def _numbered(places: Mapping[int, int]) -> dict[int, Place]:
    """Each unit's occurrences on an axis, in order, as roles of their own."""
    count: dict[int, int] = defaultdict(int)
    labels: dict[int, Place] = {}
    for position in sorted(places):
        unit = places[position]
        labels[position] = (str(count[unit]), (unit,))
        count[unit] += 1
    return labels


def inner_spaces(
    prefix: str, layer: int, inner: int, per: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, tuple[Group, ...]]]]:
    """What queries and keys may share: anything, or what commutes with rotary positions on all or part of a head."""
    qk, rotary = f"{prefix}qk.{layer}", f"{prefix}rotary.{layer}"
    yield qk, {qk: (Invertible(inner, per=per), *(turning(inner, per)))}
    for width in range(inner - 2, 0, -2):
        options = {rotary: turning(width, per), qk: (Invertible(inner - width, per=per),)}
        yield f"[{rotary} | {qk}]", options
        yield f"[{qk} | {rotary}]", options


def turning(width: int, per: tuple[str, ...]) -> tuple[Group, ...]:
    if width % 2:
        return ()
    layouts = ("half", "interleaved")
    whole = tuple(Rotary(width, per=per, layout=layout) for layout in layouts)
    signs = tuple(replace(group, phase="sign", scale=False) for group in whole)
    return (*whole, *signs)
