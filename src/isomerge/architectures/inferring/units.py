"""From influences to spaces: which rows and columns of the tensors on disk are the same units.

Units that act on each other one to one are one unit; what shares units is one space. A stream, the hidden layer of a
feed-forward and the values of a head are all found so. Queries and keys are found by what they move: all inputs
behind their head.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from isomerge.architectures.inferring.influence import OUTPUT, Event, Port, Response, Tracer, moved_by_parameter
from isomerge.architectures.inferring.sandbox import Sandbox

Axis = tuple[str, int]  # a tensor on disk, and which of its axes
Item = tuple[str, int, int]
Label = tuple[str, ...] | tuple[str, tuple[int, ...]] | None
FEW = 12  # vectors this short are looked at unit by unit


class Unions:
    """Units that are one."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def find(self, item: Item) -> Item:
        root = item
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, first: Item, second: Item) -> None:
        a, b = self.find(first), self.find(second)
        if a != b:
            self._parent[max(a, b)] = min(a, b)

    def known(self, item: Item) -> bool:
        return item in self._parent


@dataclass
class Heads:
    """An attention: where its heads are written from and read."""

    sink: Axis
    heads: int
    groups: int
    inner: int
    labels: dict[Axis, dict[int, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)  # role -> units of one head

    @property
    def shared(self) -> int:
        """Query heads per key."""
        return self.heads // self.groups


@dataclass
class UnitSpace:
    """Axes that share units. `labels[axis][position]` is the number of the unit."""

    size: int
    labels: dict[Axis, dict[int, int]]
    sources: set[Axis]
    sinks: set[Axis]
    gains: set[Axis]
    pinned: bool = False


class Units:
    """All units of one traced model, by their names on disk."""

    def __init__(self, sandbox: Sandbox, tracer: Tracer) -> None:
        self.sandbox, self.tracer = sandbox, tracer
        self.names = list(sandbox.offsets)
        self.starts = torch.tensor([sandbox.offsets[n] for n in self.names])
        self.unions, self.pinned = Unions(), set[Item]()
        self.kinds: dict[Axis, set[str]] = defaultdict(set)
        self.vector_kinds: dict[str, str] = {}
        self._disk: dict[Port, list[tuple[str, int, dict[int, int]]]] = {}
        trace = tracer.trace
        self._mark(trace.sources, "source")
        self._mark(trace.sinks, "sink")
        self.blocks: dict[int, list[Response]] = defaultdict(list)
        for response in trace.responses:
            self._join(response)
        self._leftovers()
        self.attentions = [h for rs in self.blocks.values() if (h := self._heads(rs)) is not None]

    # --- where units are on disk ---------------------------------------------------------------------------------
    def on_disk(self, port: Port) -> list[tuple[str, int, dict[int, int]]]:
        """For every tensor that holds a port's units: its axis, and from unit to position on that axis."""
        if port not in self._disk:
            self._disk[port] = list(self._find(port)) if port.parameter in self.sandbox.places else []
        return self._disk[port]

    def _find(self, port: Port) -> Iterator[tuple[str, int, dict[int, int]]]:
        place, axis = self.sandbox.places[port.parameter], port.axis
        if port.expert is not None:
            place, axis = place[port.expert], axis - 1
        if axis >= place.ndim:
            return
        units = place.movedim(axis, 0).reshape(place.shape[axis], -1)[port.start :].contiguous()
        owner = torch.searchsorted(self.starts, units, right=True) - 1
        for number in owner.unique().tolist():
            name, here = self.names[number], owner == number
            shape = self.sandbox.state[name].shape
            rows = here.any(1).nonzero().flatten()
            coordinates = torch.stack(torch.unravel_index(units - self.starts[number], shape), 0)  # (axes, units, rest)
            for own in range(len(shape)):
                low = coordinates[own].masked_fill(~here, 1 << 40).min(1).values[rows]
                high = coordinates[own].masked_fill(~here, -1).max(1).values[rows]
                if torch.equal(low, high) and (len(low.unique()) == len(rows)) and (len(rows) > 1 or shape[own] == 1):
                    yield name, own, dict(zip(rows.tolist(), low.tolist(), strict=True))
                    break

    def items(self, event: Event, unit: int) -> list[Item]:
        return [
            (name, axis, positions[unit])
            for port in (event.port, *event.others)
            for name, axis, positions in self.on_disk(port)
            if unit in positions
        ]

    def _mark(self, events: Sequence[Event], kind: str) -> None:
        for event in events:
            for port in (event.port, *event.others):
                for name, axis, _ in self.on_disk(port):
                    self.kinds[name, axis].add(kind)
            for unit in range(event.value.shape[event.unit_axis]):  # a bias belongs to its weight
                items = self.items(event, unit)
                for other in items[1:]:
                    self.unions.join(items[0], other)

    # --- unit to unit --------------------------------------------------------------------------------------------
    def _join(self, response: Response) -> None:
        moved = response.moved
        sets: dict[tuple[int, ...], int] = defaultdict(int)
        reached = [tuple(row.nonzero().flatten().tolist()) for row in moved]
        for reach in reached:
            sets[reach] += len(reach) > 1
        block = False
        for unit, reach in enumerate(reached):
            if len(reach) > 1 and (sets[reach] > 1 or len(reach) == moved.shape[1]):
                block = True
            elif reach and (len(reach) == 1 or not block):
                self._join_unit(response, unit, reach)
        if block:
            self.blocks[id(response.sink)].append(response)
        elif response.local is not None:
            self.blocks[id(response.sink)].append(response)  # values and gates of that sink

    def _join_unit(self, response: Response, unit: int, reach: Sequence[int]) -> None:
        for first in self.items(response.source, unit):
            if response.sink.port.parameter == OUTPUT:
                self.pinned.add(first)
            for column in reach:
                for second in self.items(response.sink, column):
                    self.unions.join(first, second)

    def _leftovers(self) -> None:
        """Parameters that are no layer's weight: tables, tokens, gains a model multiplies by itself."""
        trace = self.tracer.trace
        used = {p.parameter for e in trace.sinks for p in (e.port, *e.others)}
        used |= {p.parameter for r in trace.responses for p in (r.source.port, *r.source.others)}
        for name, parameter in self.tracer.model.named_parameters():
            if name in used:
                continue
            for axis, size in enumerate(parameter.shape):
                if size > 1:
                    self._leftover(name, axis, size)

    def _leftover(self, name: str, axis: int, size: int) -> None:
        probes = sorted({0, 1, size // 2, size - 1})
        moved = [(i, moved_by_parameter(self.tracer, name, axis, i)) for i in probes]
        port = Port(name, axis)
        for number, sink in enumerate(self.tracer.trace.sinks):
            hits = [(i, m[number].nonzero().flatten().tolist()) for i, m in moved if number in m]
            width = sink.value.shape[sink.unit_axis]
            if len(hits) == len(probes) and all(hit == [i] for i, hit in hits) and width == size:
                for unit in range(size):
                    for disk, own, _ in self.on_disk(port):
                        self.kinds[disk, own].add("source")
                        if self.tracer.model.get_parameter(name).ndim == 1:
                            self.vector_kinds[disk] = "gain"
                    for first in [(n, a, p[unit]) for n, a, p in self.on_disk(port) if unit in p]:
                        for second in self.items(sink, unit):
                            self.unions.join(first, second)
                return

    # --- heads ---------------------------------------------------------------------------------------------------
    def _heads(self, responses: list[Response]) -> Heads | None:
        """What the responses of one sink say about heads; None if they say nothing simple."""
        sink = responses[0].sink
        columns = sink.value.shape[sink.unit_axis]
        roles = [(r, unit, reach, local) for r in responses for unit, reach, local in _reaches(r)]
        queries = {reach for _, _, reach, local in roles if local and len(reach) > 1}
        heads = _chunks(queries, columns)
        if heads is None:
            return None
        keys = {reach for _, _, reach, local in roles if not local and len(reach) >= columns // heads > 1}
        groups = _chunks({k for k in keys if len(k) < columns} or keys, columns)
        where = self.on_disk(sink.port)
        if groups is None or heads % groups or len(where) != 1:
            return None
        inner = columns // heads
        found = Heads((where[0][0], where[0][1]), heads, groups, inner)
        share = heads // groups
        counts: dict[tuple[str, int, int], int] = defaultdict(int)
        for column in range(columns):
            head = column // inner
            self._label(found, sink, column, "o", (head // share, head % share, column % inner))
        role: str
        place: tuple[int, ...]
        for response, unit, reach, local in roles:
            head, wide = min(reach) // inner, len(reach)
            if wide == columns // groups and not local and wide > 1 and (wide > share or inner == 1):
                role, place = "k", (head // share,)
            elif wide == inner > 1 and local:
                role, place = "q", (head // share, head % share)
            elif wide == share and not local:
                role, place = "v", (head // share,)
            elif wide == 1 and local:
                role, place = "g", (head // share, head % share)
            else:
                continue
            if role in "vg":
                self._label(found, response.source, unit, role, (*place, min(reach) % inner))
                continue
            key = (role, id(response.source), hash(place))
            self._label(found, response.source, unit, role, (*place, counts[key]))
            counts[key] += 1
        for role in "qk":
            widths = {n for (r, _, _), n in counts.items() if r == role}
            if len(widths) != 1:
                return None
            found.widths[role] = widths.pop()
        # Keys may have a part that all heads share (and rotates): queries are wider by that.
        return found if found.widths["q"] >= found.widths["k"] else None

    def _label(self, heads: Heads, event: Event, unit: int, role: str, place: tuple[int, ...]) -> None:
        for name, axis, position in self.items(event, unit):
            heads.labels.setdefault((name, axis), {})[position] = (role, place)

    # --- the other spaces ----------------------------------------------------------------------------------------
    def spaces(self) -> list[UnitSpace]:
        """Everything joined one to one that is no head's, largest first."""
        taken = {(*axis, p) for h in self.attentions for axis, places in h.labels.items() for p in places}
        members: dict[Item, list[Item]] = defaultdict(list)
        for item in list(self.unions._parent):
            members[self.unions.find(item)].append(item)
        by_axes: dict[Axis, set[Item]] = defaultdict(set)
        for root, items in members.items():
            if not any(item in taken for item in items):
                for item in items:
                    by_axes[item[0], item[1]].add(root)
        pins = {self.unions.find(item) for item in self.pinned}
        found = []
        for roots in _connected(by_axes):
            found.append(self._space(roots, members, pins))
        return sorted(found, key=lambda s: -len(s.labels))

    def _space(self, roots: set[Item], members: dict[Item, list[Item]], pins: set[Item]) -> UnitSpace:
        numbers = {root: number for number, root in enumerate(sorted(roots, key=lambda r: min(members[r])))}
        labels: dict[Axis, dict[int, int]] = defaultdict(dict)
        for root in roots:
            for name, axis, position in members[root]:
                labels[name, axis][position] = numbers[root]
        kinds = {kind: {a for a in labels if kind in self.kinds[a]} for kind in ("source", "sink")}
        gains = {a for a in labels if self.is_gain(a)}
        return UnitSpace(len(roots), dict(labels), kinds["source"], kinds["sink"] - gains, gains, bool(roots & pins))

    def is_gain(self, axis: Axis) -> bool:
        """A vector that multiplies a stream, and so has no sign of it."""
        name = axis[0]
        if self.sandbox.state[name].ndim != 1 or re.search(r"(bias|beta)$", name):
            return False
        return "sink" in self.kinds[axis] or self.vector_kinds.get(name) == "gain"


def _reaches(response: Response) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    for unit, row in enumerate(response.moved):
        reach = tuple(row.nonzero().flatten().tolist())
        if reach:
            yield unit, reach, bool(response.local[unit]) if response.local is not None else False


def _chunks(sets: set[tuple[int, ...]], columns: int) -> int | None:
    """How many equal runs they cut the columns into; None if they do not."""
    if not sets or columns % len(sets):
        return None
    size = columns // len(sets)
    wanted = {tuple(range(k * size, (k + 1) * size)) for k in range(len(sets))}
    return len(sets) if sets == wanted else None


def _connected(by_axes: dict[Axis, set[Item]]) -> list[set[Item]]:
    """Roots that stand on common axes."""
    groups: list[set[Item]] = []
    for roots in by_axes.values():
        near = [g for g in groups if g & roots]
        merged = set(roots).union(*near)
        groups = [g for g in groups if not any(g is n for n in near)] + [merged]
    return groups
