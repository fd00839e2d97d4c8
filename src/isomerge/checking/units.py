"""Would alignment help, how much, and at which level? A few layers tell.

The units of a few layers are assigned as an alignment would do it, on the weights as they are stored. A wide
feed-forward is judged by some of its units against all of the other model's. Beside each gain stands the one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isomerge.alignment.evidence import LARGE, Block, Pair, of_one_root, unit_blocks
from isomerge.alignment.report import share_moved
from isomerge.alignment.scope import Scope
from isomerge.alignment.units import Unit
from isomerge.architectures import FAMILIES, describe
from isomerge.checking.stream import is_more_than_chance, judge_stream, shuffled_rest
from isomerge.checkpoint import Checkpoint
from isomerge.choices import LEVELS
from isomerge.errors import IsomergeError
from isomerge.kinship import inner, relative_distance, squared
from isomerge.symmetry.architecture import RESIDUAL, Architecture, is_stream, layer_of
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.transform import Transform

WORK = 40_000_000_000  # multiplications for all attention units, and as many by chance; more are judged by distance
UNITS = 96  # of a wide feed-forward
WORTH = 0.05  # of the squared distance: less is noise, dead units that change places for nothing


@dataclass
class UnitMoves:
    """What the sampled spaces would do."""

    spaces: list[dict[str, Any]] = field(default_factory=list)
    gain: dict[str, float] = field(default_factory=dict)
    by_chance: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def wanting(self) -> list[str]:
        """Spaces whose units would change places for a gain."""
        return [s["name"] for s in self.spaces if s["moved"] and s["gain"] > WORTH]

    @property
    def displaced(self) -> bool:
        """Whether units are in another order, and not only as unlike as fine-tuning that went far leaves them: some fit
        others a little better then, as random ones would."""
        total = self.gain.get("full")
        if total is not None and not _is_real(total, self.by_chance):
            return False
        return any(s["moved"] and _is_real(s["gain"], s.get("by_chance")) for s in self.spaces)

    @property
    def level(self) -> str:
        """The least level that gains nearly all that can be gained; all symmetries unless that is nearly everything."""
        best = self.gain.get("full", 0.0)
        for level in LEVELS:
            if best > 0.9 and self.gain.get(level, 0.0) >= 0.98 * best:
                return level
        return "full"


def judge_units(first: Checkpoint, second: Checkpoint, layers: Collection[int], wide: bool = False) -> UnitMoves:
    """Assign the units of these layers, and of none, at every level; distances are from the first model.

    `wide`: in float64, however stored."""
    kind = first.config.get("model_type")
    if kind not in FAMILIES:
        return UnitMoves(notes=[f"no specification for '{kind}': judged by the distance of the tensors alone"])
    try:
        source, anchor = (describe(c) for c in (first, second))
        return _UnitJudge(source, anchor, layers, wide).all()
    except IsomergeError as error:
        return UnitMoves(notes=[f"units were not compared. {error}"])


class _UnitJudge:
    def __init__(self, source: BoundModel, anchor: BoundModel, layers: Collection[int], wide: bool) -> None:
        wide = wide or torch.float64 in (source.stored_precision, anchor.stored_precision)
        self.dtype = torch.float64 if wide else torch.float32
        self.source, self.anchor = source, anchor
        self.architecture = source.architecture
        self.layouts = {n: layout for n, layout in source.layouts.items() if n in anchor.layouts}
        self.scopes = {level: Scope(level).restrict(self.architecture).spaces for level in LEVELS}
        self.wanted = {None, *layers}
        self.moves = UnitMoves()
        self.work = 0
        self.earned = dict.fromkeys(LEVELS, 0.0)
        self.lucky = self.apart = 0.0
        self.random = torch.Generator().manual_seed(0)

    def all(self) -> UnitMoves:
        roots = sorted(s for s, g in self.architecture.spaces.items() if not g.per)
        around = Transform(self.architecture.spaces)
        if RESIDUAL in roots:
            row, around = judge_stream(self.source, self.anchor, self.layouts, self.scopes, self.dtype)
            if row is not None:
                self.moves.spaces.append({"name": RESIDUAL, "group": self._group(RESIDUAL), **row})
        several = [s for s in self.architecture.streams if s != RESIDUAL]
        if several:
            self.moves.notes.append(f"residual streams were not compared: there are several ({', '.join(several)})")
        for root in [r for r in roots if not is_stream(r) and layer_of(r) in self.wanted]:
            self.moves.spaces.append({"name": root, "group": self._group(root), **self._judge(root, around)})
        if self.apart:
            self.moves.by_chance = self.lucky / self.apart
            self.moves.gain = {level: max(0.0, self.earned[level] / self.apart) for level in LEVELS}
        return self.moves

    def _group(self, space: str) -> str:
        return self.architecture.spaces[space].name

    def _judge(self, root: str, around: Transform) -> dict[str, Any]:
        unit = Unit(root, self.architecture.spaces)
        names = [n for n, layout in self.layouts.items() if unit.members & layout.spaces()]
        tensors = {n: (self.source.raw(n, self.dtype), self.anchor.raw(n, self.dtype)) for n in names}
        layouts = {n: self.layouts[n] for n in names}
        pair = Pair(lambda n: tensors[n][0], lambda n: tensors[n][1], layouts, self.architecture)
        compared = [pair.tensors(n) for n in names]
        apart = sum(squared(a - b) for a, b in compared)
        size = sum(squared(a) for a, _ in compared)
        row: dict[str, Any] = {"distance": relative_distance(apart, size), "moved": 0.0, "gain": 0.0}
        if not apart:
            return row
        group = self.architecture.spaces[root]
        if group.reorders and not group.signed and group.size >= LARGE and not _nested(unit, self.architecture):
            return row | self._counted(self._wide(root, pair, around), apart)
        cost = sum(_cost(pair, n, unit) for n in names)
        if self.work + cost > WORK:
            self.moves.notes.append(f"{root} is too large to be assigned here: judged by its distance alone")
            return row
        self.work += cost
        return row | self._counted(self._whole(unit, pair, around, apart), apart)

    def _counted(self, row: dict[str, Any], apart: float) -> dict[str, Any]:
        """Gain and chance are means over the same spaces, each by its squared distance."""
        self.apart += apart
        self.lucky += row["by_chance"] * apart
        for level in LEVELS:
            self.earned[level] += row.get("levels", {}).get(level, row["gain"]) * apart
        return row

    def _whole(self, unit: Unit, pair: Pair, around: Transform, apart: float) -> dict[str, Any]:
        """All units of the space, at every level."""
        blocks = unit_blocks(pair, unit.members, around, diagonal=False)
        start = sum(_trace(block) for block in blocks)
        here = sum(inner(a, b) for a, b in map(pair.tensors, pair.layouts))
        row: dict[str, Any] = {"levels": {}}
        for level, spaces in self.scopes.items():
            leveled = Unit(unit.root, spaces)
            elements, earned = leveled.solve([_for(leveled, b) for b in blocks])
            # What moving the stream alone has gained counts as well: `start` is what the units earn in their places.
            row["levels"][level] = 2 * (max(float(earned), start, here) - here) / apart
            if level == "permutation":
                order = spaces[unit.root].order(elements[unit.root]) if unit.root in elements else None
                row["moved"] = 0.0 if order is None else share_moved(order)
        row["gain"] = max(row["levels"].values())
        row["by_chance"] = self._by_chance(unit, pair, around)
        return row

    def _by_chance(self, unit: Unit, pair: Pair, around: Transform) -> float:
        """What the same units gain when nothing is left to find."""
        shuffled = {n: shuffled_rest(*pair.tensors(n), self.random) for n in pair.layouts}
        null = Pair(shuffled.__getitem__, pair.anchor, pair.layouts, pair.architecture)
        compared = [null.tensors(n) for n in pair.layouts]
        here = sum(inner(a, b) for a, b in compared)
        blocks = unit_blocks(null, unit.members, around, diagonal=False)
        start = sum(_trace(block) for block in blocks)
        free = Unit(unit.root, self.scopes["full"])
        _, earned = free.solve([_for(free, b) for b in blocks])
        apart = sum(squared(a - b) for a, b in compared)
        return 2 * (max(float(earned), start, here) - here) / apart if apart > 0 else 0.0

    def _wide(self, root: str, pair: Pair, around: Transform) -> dict[str, Any]:
        """Some units of a wide feed-forward against all of the anchor's."""
        units = self.architecture.spaces[root].size
        rows = torch.linspace(0, units - 1, min(UNITS, units)).long()
        scores, shuffled = torch.zeros(2, len(rows), units, dtype=torch.float64)
        near = 0.0
        for name, layout in pair.layouts.items():
            a, b = pair.tensors(name)
            a = around.act(a, layout, skip={root})
            for axis, segments in enumerate(layout.axes):
                for segment in [s for s in segments if any(atom.space == root for atom in s.atoms)]:
                    left = segment.take(a, axis).reshape(units, -1)[rows]
                    right = segment.take(b, axis).reshape(units, -1)
                    scores += left @ right.mT
                    shuffled += shuffled_rest(left, right[rows], self.random) @ right.mT
                    near += squared(left - right[rows])
        chosen, gained = _assign(scores, rows)
        gain, lucky = (2 * more / near if near > 0 else 0.0 for more in (gained, _assign(shuffled, rows)[1]))
        return {
            "moved": float((chosen != rows).double().mean()), "gain": gain, "sampled_units": len(rows),
            "by_chance": lucky,
        }  # fmt: skip


def _is_real(gain: float, chance: float | None) -> bool:
    return gain > WORTH and (chance is None or is_more_than_chance(gain, chance))


def _nested(unit: Unit, architecture: Architecture) -> bool:
    """Something inside each unit that has places to change: a head, and not the sign of a unit."""
    return any(architecture.spaces[s].size > 1 for s in unit.members if s != unit.root)


def _assign(scores: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """The best partner of each unit, no two the same, and what they earn beyond their own places: (sampled, units)."""
    own = scores[torch.arange(len(rows)), rows]
    if bool((own >= scores.max(1).values).all()):
        return rows, 0.0
    picked = torch.from_numpy(linear_sum_assignment(scores.numpy(), maximize=True)[1])
    return picked, float((scores[torch.arange(len(rows)), picked] - own).sum())


def _for(unit: Unit, block: Block) -> Block:
    """A block as a unit wants it, in memory that it may spoil."""
    if not unit.diagonal:
        return Block(block.spaces, block.unsigned, block.value.clone())
    if block.depth == 1:
        return Block(block.spaces, block.unsigned, block.value[0].diagonal().clone())
    return Block(block.spaces, block.unsigned, of_one_root(block.value, block.depth).clone())


def _trace(block: Block) -> float:
    n = math.prod(block.value.shape[1 : 1 + block.depth])
    return float(block.value.reshape(n, n).diagonal().sum())


def _cost(pair: Pair, name: str, unit: Unit) -> int:
    layout = pair.layouts[name]
    widths = [math.prod(s.sizes) for axis in layout.axes for s in axis if any(a.space in unit.members for a in s.atoms)]
    return sum(widths) * math.prod(layout.shape)
