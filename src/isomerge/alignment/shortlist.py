"""Units that are too many to try each beside every other: experts, or very many heads.

Between E experts of n units each, all pairs are E² assignments of n units, and their evidence is E²n² numbers. So the
partners of a unit are first looked for by what no element inside it changes: the router's row, and for each of its
matrices X (n, d), whose rows are reordered, mirrored or rotated, the product XᵀX. Only the likeliest pairs are solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.alignment.evidence import Block, Pair
from isomerge.alignment.solvers.by_group import solve
from isomerge.alignment.units import Elements, Unit, sum_of_blocks
from isomerge.symmetry.transform import Transform

MOST = 1 << 27
"""Numbers of evidence up to which all pairs are tried: 1 GB in float64."""
CANDIDATES = 4
"""Partners of a unit that are tried by all rankings together; by each alone it is one."""
AT_ONCE = 1 << 24
"""Numbers of evidence that are alive at once."""
DIRECTIONS = 32
"""Random vectors through which XᵀX is compared."""


@dataclass(frozen=True)
class AxisRows:
    """The rows of one axis by unit, (E, *inner sizes, rest), of source and anchor."""

    spaces: tuple[str, ...]
    """Without the root."""
    unsigned: bool
    source: Tensor
    anchor: Tensor

    def block(self, pairs: Tensor) -> Block:
        """The cross-covariances of some pairs: (pairs, *inner sizes, *inner sizes)."""
        inner = self.source.shape[1:-1]
        left = self.source[pairs[:, 0]].flatten(1, -2)  # (pairs, n, rest)
        right = self.anchor[pairs[:, 1]].flatten(1, -2)
        return Block(self.spaces, self.unsigned, torch.bmm(left, right.mT).reshape(len(pairs), *inner, *inner))


def has_too_many(unit: Unit, pair: Pair, most: int | None = None) -> bool:
    """Whether the evidence of all pairs of its units is more than `most` numbers."""
    group = unit.spaces[unit.root]
    if not group.reorders or not unit.children[unit.root]:
        return False
    largest = 0
    for name in pair.touching(unit.members):
        for _, segment in pair.layouts[name].segments_with(*unit.members):
            if segment.atoms[0].space != unit.root:
                return False
            largest = max(largest, math.prod(segment.sizes))
    return largest**2 > (MOST if most is None else most)


def solve_likeliest(unit: Unit, pair: Pair, around: Transform, *, roughly: bool = False) -> tuple[Elements, Tensor]:
    """As `Unit.solve`, of the pairs that look most alike; with few units these are all pairs."""
    direct, parts = _parts(unit, pair, around)
    group, root = unit.spaces[unit.root], unit.root
    C, unsigned = sum_of_blocks(direct) if direct else (torch.zeros(1, group.size, group.size).double(), None)
    tables = [C[0], *([] if unsigned is None else [unsigned[0]]), *(_likeness(part) for part in parts)]
    pairs = _shortlist([table.cpu() for table in tables])
    scores = [unit.solve_inside(blocks, build=False, roughly=True)[1].cpu() for blocks in _blocks(parts, pairs)]
    inside = _filled(pairs, torch.cat(scores), group.size).to(C.device)
    if group.signed:  # the inner scores do not depend on the sign
        unsigned = inside[None] if unsigned is None else unsigned + inside
        chosen, earned = solve(group, C, unsigned, roughly=roughly, by=unit.solver)
    else:
        chosen, earned = solve(group, C + inside, unsigned, roughly=roughly, by=unit.solver)
    order = group.order(chosen)
    assert order is not None
    places = torch.arange(group.size)
    picked = torch.stack([order[0].cpu(), places], dim=1)
    solved = [unit.solve_inside(blocks, roughly=roughly) for blocks in _blocks(parts, picked)]
    elements = {space: torch.cat([part[space] for part, _ in solved]) for space in solved[0][0]}
    guessed = inside[picked[:, 0], places].sum()
    return {root: chosen[0], **elements}, earned[0] - guessed + sum(score.sum() for _, score in solved)


def _parts(unit: Unit, pair: Pair, around: Transform) -> tuple[list[Block], list[AxisRows]]:
    """What the root's own axes say of all pairs, and the rows of those with spaces inside."""
    direct, parts = [], []
    for name in pair.touching(unit.members):
        source, anchor = pair.tensors(name)
        layout = pair.layouts[name]
        source = around.act(source, layout, skip=unit.members)
        for axis, segment in layout.segments_with(*unit.members):
            left, right = segment.take(source, axis), segment.take(anchor, axis)
            spaces, unsigned = tuple(a.space for a in segment.atoms), any(a.unsigned for a in segment.atoms)
            if len(spaces) > 1:
                parts.append(AxisRows(spaces[1:], unsigned, left, right))
            else:
                direct.append(Block(spaces, unsigned, (left.double() @ right.double().mT)[None]))
    return direct, parts


def _likeness(part: AxisRows) -> Tensor:
    """How much XᵀX of every source unit resembles that of every anchor unit, less what all units share: (E, E).

    ⟨XᵀX, YᵀY⟩ through random directions Ω: XᵀXΩ is (d, k) where XᵀX is (d, d).
    """
    rest = part.source.shape[-1]
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(rest, min(DIRECTIONS, rest), generator=draw, dtype=torch.float64)
    sketches: list[Tensor] = []
    for rows in (part.source, part.anchor):
        each = [(X.flatten(0, -2), directions.to(X)) for X in rows]
        sketch = torch.stack([(X.mT @ (X @ omega)).flatten() for X, omega in each]).double()
        sketch -= sketch.mean(0)
        sketches.append(sketch / sketch.norm(dim=1, keepdim=True).clamp_min(1e-300))
    return sketches[0] @ sketches[1].mT


def _shortlist(tables: Sequence[Tensor]) -> Tensor:
    """(pairs, 2): source and anchor units likely for one of the two, and every unit beside the one in its place."""
    size = len(tables[0])
    standard = [(t - t.mean()) / t.std().clamp_min(1e-300) for t in map(Tensor.double, tables) if len(t) > 1]
    together = sum(standard, start=torch.zeros(size, size, dtype=torch.float64))
    chosen = torch.eye(size, dtype=torch.bool)
    for table, few in [*((table, 1) for table in standard), (together, min(CANDIDATES, size))]:
        for dim in (0, 1):
            chosen.scatter_(dim, table.topk(few, dim=dim).indices, True)
    return chosen.nonzero()


def _blocks(parts: Sequence[AxisRows], pairs: Tensor) -> Iterator[list[Block]]:
    """The evidence inside some pairs, a few pairs at a time."""
    inner = max(math.prod(part.source.shape[1:-1]) for part in parts)
    for some in pairs.split(max(1, AT_ONCE // inner**2)):
        yield [part.block(some.to(part.source.device)) for part in parts]


def _filled(pairs: Tensor, scores: Tensor, size: int) -> Tensor:
    """Scores of all pairs: those that were not solved are worse than any that was."""
    worst = scores.min() - (scores.max() - scores.min()) - scores.abs().max()
    table = torch.full((size, size), float(worst), dtype=torch.float64)
    table[pairs[:, 0], pairs[:, 1]] = scores.double()
    return table
