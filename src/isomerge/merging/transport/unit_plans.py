"""The plans of one unit of a model: a space that stands by itself (heads, hidden units) and those inside it; or the
residual stream.

Heads and what is inside them are one problem: a pair of heads costs what is left after its inner units were carried to
each other in the best way, and heads are then carried at that cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.merging.transport.evidence import UnitDistances
from isomerge.merging.transport.plans import Pair, TransportPlans
from isomerge.merging.transport.solver import TransportSolver

HEADS = ("matched", "across", "fixed")
SWEEPS = 4  # inner spaces of grouped queries depend on each other; they settle at once or in two or three turns


@dataclass(frozen=True)
class PairCosts:
    """Squared distances inside one pair of outer units, with the energies masses are taken from."""

    spaces: tuple[str, ...]
    cost: Tensor
    energy_a: Tensor
    energy_b: Tensor
    within: tuple[Tensor, Tensor] | None = None

    def seen_by(self, space: str, others: Mapping[str, Tensor]) -> Tensor:
        """The cost between units of one space, all others carried by their plans (or evenly)."""
        k, n = self.spaces.index(space), len(self.spaces)
        cost = self.cost.movedim((k, n + k), (0, 1))
        names = [s for s in self.spaces if s != space]
        for number, other in enumerate(names):
            left = len(names) - number
            cost = cost.movedim((2, 2 + left), (-2, -1))
            cost = (cost * _weight(others.get(other), cost.shape[-2:])).sum((-2, -1))
        return cost

    def inside(self, space: str) -> tuple[Tensor, Tensor] | None:
        """The squared distances between the units of one space inside each model, over all others."""
        if self.within is None:
            return None
        first, second = (_along_both(one, self.spaces.index(space)) for one in self.within)
        return first, second

    def total(self, plans: Mapping[str, Tensor], inner: float = 0.0) -> float:
        """What the plans leave: of the distances across the models, and a share `inner` of those within them."""
        first = self.spaces[0]
        cost = self.seen_by(first, plans)
        across = float((cost * _weight(plans.get(first), cost.shape)).sum())
        gaps = [_gap(within, plans[space]) for space in self.spaces if (within := self.inside(space)) is not None]
        return (1 - inner) * across + inner * sum(gaps) / max(1, len(gaps))


def _weight(plan: Tensor | None, shape: Sequence[int]) -> Tensor:
    """A plan scaled to the number of units, so that sums over it are sums of squared distances."""
    rows, columns = shape
    even = torch.full((rows, columns), 1 / (rows * columns), dtype=torch.float64) if plan is None else plan
    scale: float = (rows * columns) ** 0.5
    return even * scale


def _along_both(within: Tensor, axis: int) -> Tensor:
    """(units, units) of one space, summed over the others, whose units go with themselves."""
    n = within.ndim // 2
    moved = within.movedim((axis, n + axis), (0, 1))
    for _ in range(n - 1):
        moved = moved.diagonal(dim1=2, dim2=2 + (moved.ndim - 2) // 2).sum(-1)
    return moved


def _gap(within: tuple[Tensor, Tensor], plan: Tensor) -> float:
    """Σ (A_ik − B_jl)² P_ij P_kl, for as many units as there are in the mean."""
    first, second = (one.clamp(min=0).sqrt() for one in within)
    squares = plan.sum(1) @ first.square() @ plan.sum(1) + plan.sum(0) @ second.square() @ plan.sum(0)
    scale: float = plan.numel() ** 0.5
    return max(0.0, scale * float(squares - 2 * ((first @ plan @ second) * plan).sum()))


def solve_unit(
    root: str, evidence: Sequence[UnitDistances], plans: TransportPlans, solver: TransportSolver, heads: str,
    target: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the plans of a space and of those inside it into `plans`. What no evidence speaks of stays. `target`: the
    squared distances within what a space of its own is carried to, where that is not the anchor."""
    inner = sorted({s for e in evidence for s in e.spaces if s != root})
    if not inner:
        if evidence:
            plans.outer[root] = _flat(evidence, solver, target)
        return
    counts = evidence[0].cost.shape[0], evidence[0].cost.shape[len(evidence[0].spaces)]
    if heads == "across":
        plans.outer[root] = torch.eye(counts[0], dtype=torch.float64) / counts[0]
        for space in inner:
            plans.across[space] = _flat([e for e in evidence if space in e.spaces], solver)
        return
    if heads == "fixed":
        outer = torch.eye(counts[0], dtype=torch.float64) / counts[0]
    else:
        outer = _outer(evidence, root, counts, solver)
    plans.outer[root] = outer
    inner_plans: dict[Pair, dict[str, Tensor]] = {
        (a, b): solve_pair(blocks_of(evidence, root, a, b), solver)[0] for a, b in outer.nonzero().tolist()
    }
    for space in inner:
        plans.inner[space] = {pair: solved[space] for pair, solved in inner_plans.items()}


def _outer(evidence: Sequence[UnitDistances], root: str, counts: tuple[int, int], solver: TransportSolver) -> Tensor:
    """The plan of the outer units: each pair at the price its inner units leave."""
    score = torch.zeros(counts, dtype=torch.float64)
    for a, b in itertools.product(*map(range, counts)):
        score[a, b] = solve_pair(blocks_of(evidence, root, a, b), solver)[1]
    energies = [torch.stack([_along(e, 0) for e in side]).sum(0) for side in _energies(evidence)]
    plan = solver.plan(score, energies[0], energies[1])
    return torch.where(plan > 1e-9 * plan.max(), plan, 0)


def _energies(evidence: Sequence[UnitDistances]) -> tuple[list[Tensor], list[Tensor]]:
    return [e.energy_a for e in evidence], [e.energy_b for e in evidence]


def blocks_of(evidence: Sequence[UnitDistances], root: str, a: int, b: int) -> list[PairCosts]:
    """The evidence about the insides of one pair of outer units; the outer space comes first on every axis."""
    costs = []
    for e in evidence:
        n = len(e.spaces)
        assert e.spaces[0] == root, e.spaces
        within = None
        if e.within is not None:
            within = e.within[0].select(n, a).select(0, a), e.within[1].select(n, b).select(0, b)
        costs.append(PairCosts(e.spaces[1:], e.cost.select(n, b).select(0, a), e.energy_a[a], e.energy_b[b], within))
    return costs


def solve_pair(blocks: Sequence[PairCosts], solver: TransportSolver) -> tuple[dict[str, Tensor], float]:
    """TransportPlans of the inner spaces of one pair of outer units, and the squared distance they leave."""
    alone = {b.spaces[0] for b in blocks if len(b.spaces) == 1}
    spaces = sorted({s for b in blocks for s in b.spaces}, key=lambda s: (s not in alone, s))
    bare = sum(float(b.cost) for b in blocks if not b.spaces)
    inner = [b for b in blocks if b.spaces]
    best: tuple[dict[str, Tensor], float] = ({}, float("inf"))
    plans: dict[str, Tensor] = {}
    for sweep in range(SWEEPS):
        for space in spaces:
            # A space with evidence of its own starts from that: nothing is known of the others yet.
            sure = [b for b in inner if b.spaces == (space,)] if sweep == 0 and space in alone else []
            seen = sure or [b for b in inner if space in b.spaces]
            plans = {**plans, space: _plan_of(space, seen, plans, solver)}
        total = sum(b.total(plans, solver.inner if solver.looks_inside else 0.0) for b in inner)
        if total >= best[1]:
            break
        best = plans, total
        if all(len(b.spaces) == 1 for b in inner):
            break
    return best[0], bare + (best[1] if inner else 0.0)


def _plan_of(space: str, blocks: Sequence[PairCosts], plans: Mapping[str, Tensor], solver: TransportSolver) -> Tensor:
    cost = sum((b.seen_by(space, plans) for b in blocks[1:]), blocks[0].seen_by(space, plans))
    energies = [
        torch.stack([_along(e, b.spaces.index(space)) for b, e in zip(blocks, side, strict=True)]).sum(0)
        for side in ([b.energy_a for b in blocks], [b.energy_b for b in blocks])
    ]
    return solver.plan(cost, energies[0], energies[1], _summed([b.inside(space) for b in blocks]))


def _summed(within: Sequence[tuple[Tensor, Tensor] | None]) -> tuple[Tensor, Tensor] | None:
    pairs = [pair for pair in within if pair is not None]
    return (_sum_all([a for a, _ in pairs]), _sum_all([b for _, b in pairs])) if pairs else None


def _sum_all(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _along(values: Tensor, axis: int) -> Tensor:
    """Summed over every other axis."""
    moved = values.movedim(axis, 0)
    return moved.reshape(len(moved), -1).sum(1)


def _flat(evidence: Sequence[UnitDistances], solver: TransportSolver, target: Tensor | None = None) -> Tensor:
    """One plan over all units at once, as if no space lay inside another."""
    costs = [e.cost.reshape(e.energy_a.numel(), e.energy_b.numel()) for e in evidence]
    energies = [[e.flatten() for e in side] for side in _energies(evidence)]
    sums = [sum(parts[1:], parts[0]) for parts in (costs, *energies)]
    within = flat_within(evidence)
    if within is not None and target is not None:
        within = target, within[1]
    return solver.plan(sums[0], sums[1], sums[2], within)


def flat_within(evidence: Sequence[UnitDistances]) -> tuple[Tensor, Tensor] | None:
    """Squared distances between all units of the anchor, and between all of the source."""
    return _summed([
        None if e.within is None else (
            e.within[0].reshape(e.energy_a.numel(), -1), e.within[1].reshape(e.energy_b.numel(), -1)
        )
        for e in evidence
    ])  # fmt: skip


# --- the residual stream ----------------------------------------------------------------------------------------------
POLICIES = ("joint", "averaging", "weighted", "weighted_units", "first", "identity")


def stream_plan(
    policy: str, evidence: Sequence[UnitDistances], solver: TransportSolver, target: Tensor | None = None
) -> Tensor:
    """The stream has many writers, and each finds its own plan; the policy says how they become one.

    | policy | the plan of the stream |
    |---|---|
    | joint | one solve on the evidence of all writers, each counting the same; with a hard solver a permutation |
    | averaging | the mean of the writers' plans |
    | weighted | their mean, each weighted by the size of what it writes |
    | weighted_units | the same, unit by unit of the anchor |
    | first | that of the embeddings, where the stream starts: the first piece of evidence |
    | identity | the stream keeps its units, and nothing is solved |
    """
    seen = [e.normalised() for e in evidence]
    if policy in ("joint", "first"):
        return _flat(seen if policy == "joint" else seen[:1], solver, target)
    plans = torch.stack([solver.plan(e.cost, e.energy_a, e.energy_b, e.within) for e in seen])
    shares = torch.ones(len(plans), plans.shape[1], dtype=torch.float64)
    if policy == "weighted":
        shares *= torch.tensor([e.size for e in evidence], dtype=torch.float64)[:, None]
    elif policy == "weighted_units":
        shares = torch.stack([e.energy_a for e in evidence]).double().clamp(min=0).sqrt() + 1e-12
    return (plans * (shares / shares.sum(0))[..., None]).sum(0)
