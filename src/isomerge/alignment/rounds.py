"""The sweep: a few units, then the residual stream, then the next units, until the objective stops rising.

The objective is Σ w ⟨g·B, A⟩ over all tensors, with one weight per unit (1/Σ‖A‖‖B‖ of its tensors): each unit counts
the same for the residual stream, and inside a unit the plain Euclidean distance is minimised, so both steps climb the
same hill. Embeddings and heads start it, since they are the only tensors that meet the residual stream alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.activations import TIE, Activations
from isomerge.alignment.chains import chains, leaders
from isomerge.alignment.evidence import (
    LEAST_CHANGE,
    Block,
    Evidence,
    EvidenceSum,
    Pair,
    added_evidence,
    distance_weight,
    is_noise,
    stream_cross,
    unit_blocks,
)
from isomerge.alignment.graph_matching import stream_order
from isomerge.alignment.shortlist import has_too_many, solve_likeliest
from isomerge.alignment.solvers.assignment import identity_is_optimal
from isomerge.alignment.solvers.by_group import SOLVERS, solve
from isomerge.alignment.solvers.by_group import score as best_score
from isomerge.alignment.units import Elements, Unit
from isomerge.symmetry.architecture import RESIDUAL, is_stream
from isomerge.symmetry.groups import Group, Trivial
from isomerge.symmetry.transform import Transform, dimension
from isomerge.threads import Run

STOP_RISING = 5e-4
"""A sweep was the last if the objective rose by less than this share of what two equal models would have more."""
ROUNDS = 8
"""How often a stream that rotates is solved in one sweep: the oftener, the fewer sweeps, and the fewer units at once.
An order is solved once a sweep, from all units: found from a few, it keeps them where they are."""

Tick = Callable[[int, int], None]  # bytes just solved, and the most there can be


def no_tick(done: int, most: int) -> None:
    """Nobody is watching."""


@dataclass
class Sweeper:
    """Solves all spaces of a pair. `run` maps over units (in parallel); `tick` is told of every finished unit."""

    pair: Pair
    run: Run
    tick: Tick = no_tick
    skip_names: Collection[str] = ()  # folded norms carry no evidence
    device: str = "cpu"
    solver: str = "assignment"
    activations: Activations | None = None  # evidence from data, beside or instead of the weights
    rough_pair: Pair | None = None
    """The same models for all sweeps but the last, where fewer digits are enough."""
    stream_name: str = ""
    """Which residual stream, of a model with several; by default the one there is."""
    beside: Transform | None = None
    """Elements of the other streams, which are solved already."""
    objective: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        spaces = self.pair.architecture.spaces
        roots = [s for s, g in spaces.items() if not g.per and not is_stream(s)]
        units = [Unit(root, spaces, self.solver) for root in roots]
        moving = [u for u in units if any(g.movable for g in u.spaces.values()) and self.pair.touching(u.members)]
        self._leader = leaders(self.pair.architecture, self.pair.layouts)
        self.chains = chains(moving, self._leader, self.pair.layouts.values())
        self.units = [unit for chain in self.chains for unit in chain]
        self.stream_name = self.stream_name or next(iter(self.pair.architecture.streams), RESIDUAL)
        self.stream = spaces.get(self.stream_name, Trivial(0))
        self.names = [n for n in self.pair.layouts if n not in self.skip_names]
        self._weights: dict[str, float] = {}  # by tensor, where the stream moves
        self._passes = 1  # over all units, at most
        sizes = {n: 4 * torch.Size(lay.shape).numel() for n, lay in self.pair.layouts.items()}
        self._bytes = {u.root: sum(sizes[n] for n in self.pair.touching(u.members)) for u in self.units}

    def __getstate__(self) -> dict[str, Any]:
        """In another process, where one unit is solved, nothing is mapped and nobody watches."""
        return {**self.__dict__, "run": None, "tick": no_tick}

    # --- the loop ---------------------------------------------------------------------------------------------------
    def solve(self, sweeps: int) -> Transform:
        """The best transform found, identities left out."""
        around = self._around()
        spaces = around.spaces
        if not self.stream.movable:
            return Transform(spaces, self._solve_units(self.units, around)[0])
        self._weights = self.tensor_weights()
        sums = self._sums_in_place()
        if self._stream_stays(sums):
            return Transform(spaces, self._solve_units(self.units, around)[0])
        if self.solver == "graph":
            residual = stream_order(self.pair, self.units, self._weights, self.run)
        else:
            residual = self._first_guess(sums["outer"])
        settled = self._stream_word() == "activations" and self._is_whole(residual)
        if not settled:  # else nothing is left for the weights to say about the stream
            residual = self._swept(residual, sums["alone"], max(1, sweeps))
        elements, earned = self._solve_units(self.units, self._around(residual))
        self.objective.append(earned + self._earned(residual, self._with_activations(*sums["alone"])))
        return Transform(spaces, {self.stream_name: residual, **elements})

    def solve_units(self) -> Transform:
        """All units, next to streams that are known."""
        self._weights = self.tensor_weights()
        elements, earned = self._solve_units(self.units, self._around())
        self.objective.append(earned)
        return self._around(elements=elements)

    def _around(self, residual: Tensor | None = None, elements: Elements | None = None) -> Transform:
        """The other streams as they are, with an element of this one and of units."""
        beside = {} if self.beside is None else self.beside.elements
        own = {} if residual is None else {self.stream_name: residual}
        return Transform(self.pair.architecture.spaces, {**beside, **own, **(elements or {})})

    def stream_stays(self) -> bool:
        """Whether two models are siblings as far as their residual stream can tell."""
        self._weights = self.tensor_weights()
        return self._stream_stays(self._sums_in_place())

    def proved_in_place(self, unit: Unit) -> bool:
        """Whether the units have the best order and signs already, where that can be proved without solving."""
        return self._keeps_its_order(unit, self._around())

    def _swept(self, residual: Tensor, alone: Evidence, sweeps: int) -> Tensor:
        """The stream's element after some sweeps: a few units are solved, then the stream, then the next units.

        Nothing here is final, so evidence is float32 and assignments are nearly the best. Units that were solved next
        to the same stream are left as they are. The number of units solved at once follows from the model alone.
        """
        at_once = max(1, math.ceil(len(self.chains) / (1 if self.stream.reorders else ROUNDS)))
        parts = [self.chains[k : k + at_once] for k in range(0, max(1, len(self.chains)), at_once)]
        rounds = [[unit for chain in part for unit in chain] for part in parts]
        self._passes = sweeps + 1
        beside: dict[int, Tensor] = {}  # where the stream was when a round was solved
        evidence: dict[int, Evidence] = {}
        inside: dict[int, float] = {}  # what a round earns without the stream
        for sweep in range(sweeps):
            for number, units in enumerate(rounds):
                if number in beside and torch.equal(beside[number], residual):
                    continue
                beside[number] = residual
                around = self._narrowed(self._around(residual))
                elements, earned = self._solve_units(units, around, roughly=True)
                moved = self._narrowed(self._around(elements=elements))
                evidence[number] = self._stream_evidence(self._names_of(units), moved, roughly=True)
                inside[number] = earned - self._earned(residual, evidence[number])
                total = self._with_activations(*added_evidence([alone, *evidence.values()]))
                residual = self._best_for_stream(*total)
            self.objective.append(self._earned(residual, total) + sum(inside.values()))
            if sweep and self.objective[-1] - self.objective[-2] <= STOP_RISING * (self._most() - self.objective[-1]):
                break
        return residual

    def _most(self) -> float:
        """The objective of two equal models."""
        return float(len({self._root_of(name) or name for name, weight in self._weights.items() if weight > 0}))

    def _solve_units(self, units: list[Unit], around: Transform, *, roughly: bool = False) -> tuple[Elements, float]:
        weights = self._unit_weights(units)
        elements: Elements = {}
        earned = 0.0
        members = {unit.root for unit in units}
        linked = [chain for chain in self.chains if chain[0].root in members]
        results = self._solve_together(units, around, roughly) or self.run(
            lambda chain: self._solve_chain(chain, around, roughly), linked, lambda place: self._finished(linked[place])
        )
        for chain, (solved, score) in zip(linked, results, strict=True):
            groups = {s: g for unit in chain for s, g in unit.spaces.items()}
            elements |= {s: e for s, e in solved.items() if groups[s].movable}
            earned += weights[chain[0].root] * float(score)
        return elements, earned

    def _solve_chain(self, chain: list[Unit], around: Transform, roughly: bool) -> tuple[Elements, Tensor]:
        """Units that share tensors one after the other, and then each next to all others."""
        if len(chain) == 1:
            return self._solve_unit(chain[0], around, roughly)
        solved: Elements = {}
        unsolved = {s for unit in chain for s in unit.members}
        for unit in (*chain, *chain):
            unsolved -= unit.members
            beside = Transform(around.spaces, {**around.elements, **_without(solved, unit.members)})
            blocks = unit_blocks(
                self._seen(roughly), unit.members, self._narrowed(beside), diagonal=unit.diagonal, unsolved=unsolved
            )
            elements, _ = unit.solve(blocks, roughly=roughly)
            solved |= {s: e.cpu() for s, e in elements.items() if unit.spaces[s].movable}
        members = {s for unit in chain for s in unit.members}
        return solved, self._agreement(members, Transform(around.spaces, {**around.elements, **solved}), roughly)

    def _agreement(self, spaces: Collection[str], moved: Transform, roughly: bool) -> Tensor:
        """Σ ⟨g·B, A⟩ over the tensors of some spaces."""
        pair, total = self._seen(roughly), torch.zeros((), dtype=torch.float64)
        for name in pair.touching(spaces):
            source, anchor = pair.tensors(name)
            total += (self._narrowed(moved).act(source, pair.layouts[name]) * anchor).sum(dtype=torch.float64).cpu()
        return total

    def _earned(self, residual: Tensor, evidence: Evidence) -> float:
        """What an element of the stream earns of its evidence."""
        C, unsigned = evidence
        earned = float(self.stream.act(residual, C).diagonal().sum())
        if unsigned is not None:
            earned += float(self.stream.act(residual, unsigned, unsigned=True).diagonal().sum())
        return earned

    def _solve_together(
        self, units: list[Unit], around: Transform, roughly: bool
    ) -> list[tuple[Elements, Tensor]] | None:
        """On an accelerator, all units whose heads keep their places as one batch: a launch costs more than a head."""
        if self.device == "cpu" or not all(u.simple for u in units) or len(units) > len(self._leaders_of(units)):
            return None
        gathered = self.run(lambda u: u.evidence(self._blocks(u, around, roughly)), units)
        batches: dict[Group, list[tuple[int, str, Tensor]]] = {}
        for number, (unit, evidence) in enumerate(zip(units, gathered, strict=True)):
            for space, C in evidence.items():
                batches.setdefault(replace(unit.spaces[space], per=()), []).append((number, space, C))
        results: list[tuple[Elements, Tensor]] = [({}, torch.zeros((), dtype=torch.float64)) for _ in units]
        for group, members in batches.items():
            solved, scores = solve(group, torch.cat([C for _, _, C in members]), by=self.solver)
            sizes = [len(C) for _, _, C in members]
            parts = zip(solved.cpu().split(sizes), scores.cpu().split(sizes), strict=True)
            for (number, space, _), (element, score) in zip(members, parts, strict=True):
                results[number] = ({**results[number][0], space: element}, results[number][1] + score.sum())
        for unit in units:
            self._done(unit)
        return results

    def _solve_unit(self, unit: Unit, around: Transform, roughly: bool = False) -> tuple[Elements, Tensor]:
        if self._keeps_its_order(unit, around):
            return {unit.root: unit.spaces[unit.root].identity()}, torch.zeros((), dtype=torch.float64)
        heard = self.activations is not None and self.activations.speaks_of(unit)
        if not heard and has_too_many(unit, self.pair):
            solved, score = solve_likeliest(unit, self._seen(roughly), around, roughly=roughly)
        else:
            solved, score = unit.solve(self._blocks(unit, around, roughly), roughly=roughly)
        return {s: e.cpu() for s, e in solved.items()}, score.cpu()

    def judged_by_weights(self, transform: Transform) -> Transform:
        """What the weights would do with the units that activations decided."""
        seen = [u for u in self.units if self.activations is not None and self.activations.speaks_of(u)]
        around = transform.only(self.pair.architecture.streams)
        solved = self.run(lambda u: u.solve(unit_blocks(self.pair, u.members, around, diagonal=u.diagonal))[0], seen)
        elements = {s: e.cpu() for unit in solved for s, e in unit.items() if transform.spaces[s].movable}
        kept = {s: e for s, e in transform.elements.items() if not any(s in u.members for u in seen)}
        return Transform(transform.spaces, {**kept, **elements})

    def _blocks(self, unit: Unit, around: Transform, roughly: bool = False) -> list[Block]:
        pair = self._seen(roughly)
        blocks = unit_blocks(pair, unit.members, around, diagonal=unit.diagonal)
        return blocks if self.activations is None else self.activations.combined(unit, blocks, self.pair)

    def _keeps_its_order(self, unit: Unit, around: Transform) -> bool:
        """The exit that needs no cost matrix: near-identical units have the best order and signs already."""
        inner = {s: g for s, g in unit.spaces.items() if s != unit.root and g.movable}
        scales = {s for s, g in inner.items() if g.element == "factor" and g.size == 1 and g.per == (unit.root,)}
        mirrors = {s for s in scales if inner[s].signed}  # of a scale, only its sign is solved for
        root = unit.spaces[unit.root]
        if not root.reorders or root.signed or scales != inner.keys() or len(mirrors) > 1:
            return False
        if around.elements or (self.activations is not None and self.activations.speaks_of(unit)):
            return False
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        mirrored = []
        for name in self.pair.touching([unit.root]):
            tensors = self.pair.tensors(name)
            for axis, segment in self.pair.layouts[name].segments_with(unit.root):
                mirrored.append(any(atom.space in mirrors for atom in segment.atoms))
                for side, tensor in zip(rows, tensors, strict=True):
                    side.append(segment.take(tensor, axis).reshape(segment.sizes[0], -1))
        return identity_is_optimal(*rows, mirrored)

    def solved(self, place: int) -> None:
        """The unit of this place is done."""
        self._done(self.units[place])

    def _finished(self, chain: list[Unit]) -> None:
        for unit in chain:
            self._done(unit)

    def _done(self, unit: Unit) -> None:
        self.tick(self._bytes[unit.root], self._passes * sum(self._bytes.values()))

    # --- the residual stream ----------------------------------------------------------------------------------------
    def _stream_names(self) -> list[str]:
        return [n for n in self.names if self.stream_name in self.pair.layouts[n].spaces()]

    def _seen(self, roughly: bool) -> Pair:
        return self.rough_pair if roughly and self.rough_pair is not None else self.pair

    def _narrowed(self, transform: Transform) -> Transform:
        """As wide as the tensors it moves in a sweep that is not the last."""
        return transform.single() if self._seen(True).rough else transform

    def _names_of(self, units: Iterable[Unit]) -> list[str]:
        roots = self._leaders_of(units)
        return [name for name in self._stream_names() if self._own_root(name) in roots]

    def _stream_evidence(self, names: Iterable[str], moved: Transform, *, roughly: bool = False) -> Evidence:
        """Σ w · source × anchor over the stream's axis."""
        return self._stream_sums(names, moved, [self._weights], roughly)[0]

    def _stream_sums(
        self, names: Iterable[str], moved: Transform, weights: Sequence[Mapping[str, float]], roughly: bool = False
    ) -> list[Evidence]:
        """The same with several weights, for one pass over the tensors; added up in a fixed order."""
        names = [n for n in names if any(w.get(n, 0.0) > 0 for w in weights)]
        pair = self._seen(roughly)
        sums = [EvidenceSum(self.stream.size) for _ in weights]
        window = 8  # bounds the number of d × d products alive at once
        for start in range(0, len(names), window):
            chunk = names[start : start + window]
            products = self.run(lambda n: stream_cross(pair, n, moved, self.stream_name), chunk)
            for name, result in zip(chunk, products, strict=True):
                if result is None:
                    continue
                value, is_unsigned = result
                for total, weight in zip(sums, weights, strict=True):
                    if weight.get(name, 0.0) > 0 and (not is_unsigned or self.stream.reorders):
                        total.add(value.cpu(), weight[name], is_unsigned and self.stream.signed)
        return [total.evidence for total in sums]

    def _stream_word(self) -> str:
        return "weights" if self.activations is None else self.activations.word(self.stream_name)

    def _with_activations(self, C: Tensor, unsigned: Tensor | None) -> Evidence:
        """Weights and activations, each worth one per unit; next to activations alone, weights only settle ties."""
        word = self._stream_word()
        if word == "weights":
            return C, unsigned
        assert self.activations is not None and self.activations.stream is not None
        share = 1.0 if word == "mix" else TIE
        parts = {self._root_of(n) or n for n in self._stream_names() if self._weights[n] > 0}
        return share * C + len(parts) * self.activations.stream, None if unsigned is None else share * unsigned

    def _sums_in_place(self) -> dict[str, Evidence]:
        """All that is asked of the models as they are, in one pass: `alone` is what no unit changes, `outer` the tables
        among it, and `measured` has a weight for every tensor by how much it changed."""
        names = self._stream_names()
        # No tensor says more of an order than its parameters do, however equal it is in both: one that nobody trained
        # must not outvote all the others.
        least = 0.5 if self.stream.reorders else LEAST_CHANGE
        measured = self.run(lambda n: distance_weight(*self.pair.tensors(n), least), names)
        moving = self._leaders_of(self.units)
        alone = {n: self._weights[n] for n in names if self._own_root(n) not in moving}
        weights = {
            "measured": dict(zip(names, measured, strict=True)),
            "alone": alone,
            "outer": {n: self._weights[n] for n in names if self._is_outer(n)},
            **({"all": self._weights} if self.stream.reorders else {}),
        }
        nowhere = self._around()
        return dict(zip(weights, self._stream_sums(names, nowhere, list(weights.values())), strict=True))

    def _first_guess(self, outer: Evidence) -> Tensor:
        """From what speaks of the stream alone: activations, or else embeddings and heads.

        A partial isometry, since neither need span the stream.
        """
        C, unsigned = outer
        if self.activations is not None and self.activations.stream is not None and self._stream_word() != "weights":
            C, unsigned = self.activations.stream, None
        start = SOLVERS[self.stream.name].start
        return self._best_for_stream(C, unsigned) if start is None else start(C)

    def _best_for_stream(self, C: Tensor, unsigned: Tensor | None) -> Tensor:
        return solve(self.stream, C[None], None if unsigned is None else unsigned[None], by=self.solver)[0][0]

    def _is_whole(self, element: Tensor) -> bool:
        """Not a partial isometry."""
        return not self.stream.rotates or round(float(element.square().sum())) == self.stream.size

    def _stream_stays(self, sums: Mapping[str, Evidence]) -> bool:
        """Siblings: nothing discrete moves and the best rotation gains no more than noise would let it."""
        C, unsigned = sums["measured"]
        parameters = sum(torch.Size(self.pair.layouts[n].shape).numel() for n in self._stream_names())
        if self.stream.reorders:
            if self._stream_word() != "weights":
                return self._is_home(*self._with_activations(*sums["all"]))
            return self._agrees_in_place(C, unsigned, parameters) or self._is_home(*sums["all"])
        best = best_score(self.stream, C[None])  # what the best rotation earns, without building it
        gain = 2 * float(best[0] - C.diagonal().sum())
        return is_noise(gain, dimension(self.pair.architecture.spaces, self.stream_name), parameters)

    def _is_home(self, C: Tensor, unsigned: Tensor | None) -> bool:
        """No order of the stream is better than the one it has."""
        return self.stream.is_identity(solve(self.stream, C[None], None if unsigned is None else unsigned[None])[0][0])

    def _agrees_in_place(self, C: Tensor, unsigned: Tensor | None, parameters: int) -> bool:
        """Whether half of the parameters agree in the order they have, and would in no other order agree more.

        Tensors count by their parameters here, as short vectors that are nothing but noise would count as much as a
        layer otherwise. What any order has in common, such as gains of about one, says nothing of this one.
        """
        here = float(C.diagonal().sum()) - (0.0 if self.stream.signed else float(C.sum()) / len(C))
        if unsigned is not None:
            here += float(unsigned.diagonal().sum()) - float(unsigned.sum()) / len(C)
        return 2 * here > parameters and self._is_home(C, unsigned)

    # --- weights ----------------------------------------------------------------------------------------------------
    def _root_of(self, name: str) -> str | None:
        """The unit a tensor belongs to; a bias without a unit of its own counts with its weight."""
        root = self._own_root(name)
        if root is None and name.endswith(".bias"):
            weight = name.removesuffix("bias") + "weight"
            root = self._own_root(weight) if weight in self.pair.layouts else None
        return root

    def _own_root(self, name: str) -> str | None:
        """Of units that share tensors, the first by name."""
        architecture = self.pair.architecture
        roots = (architecture.root(space) for space in sorted(self.pair.layouts[name].spaces()))
        return next((self._leader[root] for root in roots if not is_stream(root)), None)

    def _leaders_of(self, units: Iterable[Unit]) -> set[str]:
        return {self._leader.get(unit.root, unit.root) for unit in units}

    def _is_outer(self, name: str) -> bool:
        """Embeddings and heads: the stream on one axis, rows without a space on another."""
        return self._own_root(name) is None and len(self.pair.layouts[name].shape) > 1

    def tensor_weights(self) -> dict[str, float]:
        """What a tensor counts in the objective: the same as all of its unit, if the stream moves."""
        if not self.stream.movable:
            return dict.fromkeys(self.names, 1.0)
        sizes = self.run(lambda name: _norms(*self.pair.tensors(name)), self.names)
        blocks: dict[str, float] = {}
        for name, size in zip(self.names, sizes, strict=True):
            block = self._root_of(name) or name
            blocks[block] = blocks.get(block, 0.0) + size
        sums = {name: blocks[self._root_of(name) or name] for name in self.names}
        return {name: 1 / size if size > 0 else 0.0 for name, size in sums.items()}

    def _unit_weights(self, units: Iterable[Unit]) -> dict[str, float]:
        if not self.stream.movable:
            return {u.root: 1.0 for u in units}
        weights = {self._own_root(name): self._weights[name] for name in reversed(self.names)}
        return {u.root: weights.get(self._leader[u.root], 0.0) for u in units}


def _without(elements: Elements, spaces: Collection[str]) -> Elements:
    return {s: e for s, e in elements.items() if s not in spaces}


def _norms(source: Tensor, anchor: Tensor) -> float:
    """‖source‖ · ‖anchor‖"""
    return float(source.norm() * anchor.norm())
