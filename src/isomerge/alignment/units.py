"""Nested spaces: units of the outer space are assigned *after* the inner spaces of every pair are solved.

Solving heads and rotations separately gets stuck: whether head 3 resembles head 7 shows only once both are rotated to
each other. So each pair is scored by what its best inner elements earn, the outer space is assigned by those scores,
and inner elements are kept for the chosen pairs.

Grouped queries couple two inner spaces (the order of the query heads and the rotations they share): there the two
alternate from two starts, one of them the order as it is, or all orders are tried when there are few. Query heads that
keep their places couple nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from isomerge.alignment.evidence import Block, is_shared
from isomerge.alignment.solvers.assignment import assign_batch
from isomerge.alignment.solvers.by_group import score, solve
from isomerge.symmetry.groups import Group

FEW_ORDERS = 24
MOST_ROUNDS = 50
Elements = dict[str, Tensor]


class Unit:
    """A root space with everything nested in it."""

    def __init__(self, root: str, spaces: Mapping[str, Group], solver: str = "assignment") -> None:
        self.root = root
        self.solver = solver
        self.spaces = {s: g for s, g in spaces.items() if s == root or root in g.per}
        self.members = frozenset(self.spaces)
        self.children = {s: [c for c, g in self.spaces.items() if g.per and g.per[-1] == s] for s in self.spaces}

    @property
    def diagonal(self) -> bool:
        """Only root unit h against root unit h is needed: a batch of small products instead of one large one."""
        return self._fixed(self.root) and bool(self.children[self.root])

    @property
    def simple(self) -> bool:
        """Heads that keep their places, and query heads too: nothing to assign."""
        inner = [s for s in self.spaces if s != self.root]
        return self.diagonal and all(not self.children[s] and self._fixed(s) for s in inner)

    def evidence(self, blocks: Sequence[Block]) -> dict[str, Tensor]:
        """Of a simple unit: the cross-covariances of each inner space, (root units, n, n).

        What stays in its place is left out: it earns the same whatever the others do.
        """
        sums: dict[str, Tensor] = {}
        for block in blocks:
            if block.depth > 1:
                *_, space = block.spaces
                value = self._uncoupled(Block(block.spaces[1:], block.unsigned, block.value)).value
                sums[space] = value if space not in sums else sums[space] + value
        return {space: C for space, C in sums.items() if self.spaces[space].movable}

    def solve(self, blocks: Sequence[Block], *, roughly: bool = False) -> tuple[Elements, Tensor]:
        """Elements of every space of the unit, and what they earn together; `roughly` where another sweep follows."""
        if self.diagonal:
            direct = sum((b.value.sum() for b in blocks if b.depth == 1), start=torch.zeros((), dtype=torch.float64))
            inner = [Block(b.spaces[1:], b.unsigned, b.value) for b in blocks if b.depth > 1]
            elements, scores = self._solve_children(self.root, inner)
            return elements, scores.sum() + direct
        elements, scores = self._solve(self.root, blocks, roughly)
        return {s: e[0] for s, e in elements.items()}, scores[0]

    # every function below works on a batch of pairs: blocks are (pairs, *source sizes, *anchor sizes)
    def _solve(self, space: str, blocks: Sequence[Block], roughly: bool = False) -> tuple[Elements, Tensor]:
        group = self.spaces[space]
        if not any(block.depth > 1 for block in blocks):  # no inner space, or nothing said of one
            C, unsigned = sum_of_blocks(blocks)
            element, scores = solve(group, C, unsigned, spoil=space == self.root, roughly=roughly, by=self.solver)
            return {space: element}, scores
        direct = [b for b in blocks if b.depth == 1]
        inner = [b for b in blocks if b.depth > 1]
        pairs = inner[0].value.shape[0]
        if self._fixed(space):
            chosen = group.identity((pairs,)).to(inner[0].value.device)
            order = torch.arange(group.size, device=chosen.device).expand(pairs, -1)
        else:
            scored = self._solve_children(space, [_all_pairs(b) for b in inner], build=False)[1]
            table = scored.reshape(pairs, group.size, group.size)
            C, unsigned = sum_of_blocks(direct) if direct else (torch.zeros_like(table), None)
            if group.signed:  # the inner scores do not depend on the sign
                unsigned = table if unsigned is None else unsigned + table
            else:
                C = C + table
            chosen, _ = solve(group, C, unsigned, roughly=roughly, by=self.solver)
            places = group.order(chosen)
            assert places is not None
            order = places
        elements, scores = self._solve_children(space, [_chosen(b, order) for b in inner])
        elements = {s: e.reshape(pairs, group.size, *e.shape[1:]) for s, e in elements.items()}
        earned = scores.reshape(pairs, group.size).sum(-1)
        for block in direct:
            picked = torch.take_along_dim(block.value, order[:, None, :].to(block.value.device), dim=1)[:, 0]
            sign = 1 if block.unsigned or (group.reorders and not group.signed) else chosen.sign()
            earned = earned + (picked * sign).sum(-1)
        return {space: chosen, **elements}, earned

    def _fixed(self, space: str) -> bool:
        """Its units keep their places."""
        return not self.spaces[space].reorders

    def solve_inside(
        self, blocks: Sequence[Block], *, build: bool = True, roughly: bool = False
    ) -> tuple[Elements, Tensor]:
        """The best elements inside every pair of root units, and what they earn; without `build` only the latter."""
        return self._solve_children(self.root, blocks, build=build, roughly=roughly)

    def _solve_children(
        self, space: str, blocks: Sequence[Block], *, build: bool = True, roughly: bool = False
    ) -> tuple[Elements, Tensor]:
        """The best inner elements of every pair, and what they earn together; without `build` only the latter."""
        blocks = [self._uncoupled(b) for b in blocks]
        if self._coupled(blocks):
            return self._alternate(space, blocks)
        elements: Elements = {}
        scores = []
        for child in self.children[space]:
            own = [b for b in blocks if b.spaces[0] == child]
            if own and (build or self.children[child]):
                solved, earned = self._solve(child, own, roughly)
                elements |= solved
                scores.append(earned)
            elif own:
                scores.append(score(self.spaces[child], *sum_of_blocks(own), by=self.solver))
        return elements, _total(scores)

    def _coupled(self, blocks: Sequence[Block]) -> bool:
        """A block over two siblings: neither is nested in the other."""
        return any(b.depth > 1 and b.spaces[0] not in self.spaces[b.spaces[1]].per for b in blocks)

    # --- grouped queries --------------------------------------------------------------------------------------------
    def _uncoupled(self, block: Block) -> Block:
        """Query heads that keep their places only add up: (pairs, h, e, h, e) -> (pairs, e, e)."""
        if not is_shared(block.spaces, self.spaces):
            return block
        return Block(block.spaces[1:], block.unsigned, block.value.diagonal(dim1=1, dim2=1 + block.depth).sum(-1))

    def _alternate(self, space: str, blocks: Sequence[Block]) -> tuple[Elements, Tensor]:
        """Order the query heads and solve the spaces they share, together."""
        query = next(b.spaces[0] for b in blocks if b.depth > 1)
        size, device = self.spaces[query].size, blocks[0].value.device
        if math.factorial(size) <= FEW_ORDERS:
            every = torch.tensor(list(itertools.permutations(range(size))), device=device)
            orders = every.expand(blocks[0].value.shape[0], *every.shape)
        else:
            home = self.spaces[query].identity(blocks[0].value.shape[:1]).to(device)
            starts = [home, self._first_order(space, query, blocks)]
            orders = torch.stack([self._improved(space, query, blocks, start.cpu()) for start in starts], dim=1)
        best: tuple[Elements, Tensor] | None = None
        for k in range(orders.shape[1]):
            order = orders[:, k]
            elements, scores = self._given_order(space, query, blocks, order)
            elements[query] = order.clone()
            if best is None:
                best = elements, scores
                continue
            better = scores > best[1] * (1 + 1e-12)  # ties keep the first order: the identity
            best = (
                {s: torch.where(better.reshape(-1, *[1] * (e.ndim - 1)), elements[s], e) for s, e in best[0].items()},
                torch.where(better, scores, best[1]),
            )
        assert best is not None
        return best

    def _given_order(self, space: str, query: str, blocks: Sequence[Block], order: Tensor) -> tuple[Elements, Tensor]:
        """The shared spaces for a fixed order of the query heads."""
        elements, scores = self._solve_children(
            space, [_summed(b, order) if b.spaces[0] == query else b for b in blocks if b.spaces != (query,)]
        )
        own = [torch.take_along_dim(C, order[:, None, :].to(C.device), dim=1).sum((1, 2)) for C in _own(query, blocks)]
        return elements, _total([*own, scores])

    def _first_order(self, space: str, query: str, blocks: Sequence[Block]) -> Tensor:
        """Per-head scores that share the key/value term out evenly."""
        size = self.spaces[query].size
        every = []
        for block in blocks:
            if block.spaces[0] == query and block.depth > 1:
                every.append(_all_pairs(block))
            elif block.spaces != (query,):
                value = block.value[:, None] / size
                value = value.expand(-1, size * size, *block.value.shape[1:]).reshape(-1, *block.value.shape[1:])
                every.append(Block(block.spaces, block.unsigned, value))
        scores = self._solve_children(space, every, build=False)[1]
        return assign_batch(_total([*_own(query, blocks), scores.reshape(-1, size, size)]))[0]

    def _improved(self, space: str, query: str, blocks: Sequence[Block], order: Tensor) -> Tensor:
        """Alternate: elements for the order, the order for the elements, until nothing changes."""
        heads = [b for b in blocks if b.spaces[0] == query and b.depth > 1]
        for _ in range(MOST_ROUNDS):
            elements, _ = self._given_order(space, query, blocks, order)
            tables = [self._earned_per_head(b, elements) for b in heads]
            following = assign_batch(_total([*_own(query, blocks), *tables]))[0]
            if torch.equal(following, order):
                break
            order = following
        return order

    def _earned_per_head(self, block: Block, elements: Elements) -> Tensor:
        """⟨g B_h, A_h'⟩ for every pair of query heads: (pairs, h, *inner, h, *inner) -> (pairs, h, h)."""
        inner, (pairs, heads) = block.depth - 1, block.value.shape[:2]
        moved = block.value.movedim(1, inner + 1)  # (pairs, *inner, h, h, *inner)
        for place, name in enumerate(block.spaces[1:]):
            shape = moved.shape
            moved = self.spaces[name].act(elements[name], moved.reshape(*shape[: place + 2], -1)).reshape(shape)
        size = math.prod(block.value.shape[2 : 2 + inner])
        return moved.reshape(pairs, size, heads, heads, size).diagonal(dim1=1, dim2=4).sum(-1)


def _summed(block: Block, order: Tensor) -> Block:
    """Query heads paired by `order` and added up: (pairs, h, *inner, h, *inner) -> (pairs, *inner, *inner)."""
    inner = block.depth - 1
    value = block.value.movedim(1 + block.depth, 2)  # (pairs, h, h, *inner, *inner)
    index = order[:, None, :].reshape(*order[:, None, :].shape, *[1] * (2 * inner)).to(value.device)
    return Block(block.spaces[1:], block.unsigned, torch.take_along_dim(value, index, dim=1).squeeze(1).sum(1))


def _own(query: str, blocks: Sequence[Block]) -> list[Tensor]:
    """What query heads have that no inner space moves: (pairs, h, h)."""
    return [b.value for b in blocks if b.spaces == (query,)]


def _total(scores: Sequence[Tensor]) -> Tensor:
    return reduce(operator.add, scores)


def sum_of_blocks(blocks: Sequence[Block]) -> tuple[Tensor, Tensor | None]:
    """(signed, unsigned) sums of blocks over one space."""
    signed = [b.value for b in blocks if not b.unsigned]
    unsigned = [b.value for b in blocks if b.unsigned]
    total = sum(signed[1:], start=signed[0]) if signed else torch.zeros_like(blocks[0].value)
    return total, sum(unsigned[1:], start=unsigned[0]) if unsigned else None


def _all_pairs(block: Block) -> Block:
    """(pairs, n, *inner, n, *inner) -> (pairs·n·n, *inner, *inner), the outer space dropped."""
    inner = block.depth - 1
    value = block.value.movedim(1 + block.depth, 2)
    return Block(block.spaces[1:], block.unsigned, value.reshape(-1, *value.shape[3 : 3 + 2 * inner]))


def _chosen(block: Block, order: Tensor) -> Block:
    """Only the pairs (order[j], j)."""
    inner = block.depth - 1
    value = block.value.movedim(1 + block.depth, 2)  # (pairs, n, n, *inner, *inner)
    index = order[:, None, :].reshape(order.shape[0], 1, order.shape[1], *[1] * (2 * inner)).to(value.device)
    picked = torch.take_along_dim(value, index, dim=1)[:, 0]
    return Block(block.spaces[1:], block.unsigned, picked.reshape(-1, *picked.shape[2:]))
