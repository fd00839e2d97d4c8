"""The sweep: residual stream, then every unit, and again until the objective stops rising.

The objective is Σ w ⟨g·B, A⟩ over all tensors, with one weight per unit (1/Σ‖A‖‖B‖ of its tensors): each unit counts
the same for the residual stream, and inside a unit the plain Euclidean distance is minimised, so both steps climb the
same hill. Embeddings and heads start it, since they are the only tensors that meet the residual stream alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isomerge.alignment.activations import TIE, Activations
from isomerge.alignment.evidence import LEAST_CHANGE, Block, Pair, distance_weight, is_noise, stream_cross, unit_blocks
from isomerge.alignment.solvers.assignment import identity_is_optimal
from isomerge.alignment.solvers.by_group import SOLVERS, solve
from isomerge.alignment.units import Elements, Unit
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.groups import Group, Trivial
from isomerge.symmetry.transform import Transform, dimension
from isomerge.threads import Run

STOP_RISING = 1e-6  # relative rise of the objective below which a sweep was the last


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
    activations: Activations | None = None  # evidence from data, beside or instead of the weights
    objective: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        spaces = self.pair.architecture.spaces
        roots = [s for s, g in spaces.items() if not g.per and s != RESIDUAL]
        units = [Unit(root, spaces) for root in roots]
        self.units = [u for u in units if any(g.movable for g in u.spaces.values())]
        self.stream = spaces.get(RESIDUAL, Trivial(0))
        self.names = [n for n in self.pair.layouts if n not in self.skip_names]
        self._weights: dict[str, float] = {}  # by tensor, where the stream moves
        self._passes = 1  # over all units, at most
        sizes = {n: 4 * torch.Size(lay.shape).numel() for n, lay in self.pair.layouts.items()}
        self._bytes = {u.root: sum(sizes[n] for n in self.pair.touching(u.members)) for u in self.units}

    # --- the loop ---------------------------------------------------------------------------------------------------
    def solve(self, sweeps: int) -> Transform:
        """The best transform found, identities left out."""
        spaces = self.pair.architecture.spaces
        if not self.stream.movable:
            return Transform(spaces, self._solve_units(Transform(spaces))[0])
        self._weights = self._tensor_weights()
        if self._stream_stays():
            return Transform(spaces, self._solve_units(Transform(spaces))[0])
        residual = self._first_guess()
        elements: Elements = {}
        settled = self._stream_word() == "activations" and self._is_whole(residual)
        sweeps = 0 if settled else max(1, sweeps)  # settled: nothing is left for the weights to say about the stream
        self._passes = sweeps + 1
        for sweep in range(sweeps):
            elements, earned = self._solve_units(Transform(spaces, {RESIDUAL: residual}))
            moved = Transform(spaces, elements)
            C, unsigned = self._with_activations(*self._stream_evidence(self._stream_names(), moved))
            if sweep:  # the first guess may be a partial isometry: nothing to compare with yet
                self.objective.append(earned)
                if len(self.objective) > 1 and earned - self.objective[-2] <= STOP_RISING * abs(earned):
                    break
            residual = self._best_for_stream(C, unsigned)
        elements, earned = self._solve_units(Transform(spaces, {RESIDUAL: residual}))
        self.objective.append(earned)
        return Transform(spaces, {RESIDUAL: residual, **elements})

    def _solve_units(self, around: Transform) -> tuple[Elements, float]:
        weights = self._unit_weights()
        elements: Elements = {}
        earned = 0.0
        results = self._solve_together(around) or self.run(lambda u: self._solve_unit(u, around), self.units)
        for unit, (solved, score) in zip(self.units, results, strict=True):
            elements |= {s: e for s, e in solved.items() if unit.spaces[s].movable}
            earned += weights[unit.root] * float(score)
        if self.stream.movable and RESIDUAL in around.elements:
            alone = [n for n in self._stream_names() if self._own_root(n) is None]
            C, unsigned = self._with_activations(*self._stream_evidence(alone, Transform(around.spaces)))
            element = around.elements[RESIDUAL]
            earned += float((self.stream.act(element, C)).diagonal().sum())
            if unsigned is not None:
                earned += float(self.stream.act(element, unsigned, unsigned=True).diagonal().sum())
        return elements, earned

    def _solve_together(self, around: Transform) -> list[tuple[Elements, Tensor]] | None:
        """On an accelerator, all units whose heads keep their places as one batch: a launch costs more than a head."""
        if self.device == "cpu" or not all(u.simple for u in self.units):
            return None
        gathered = self.run(lambda u: u.evidence(self._blocks(u, around)), self.units)
        batches: dict[Group, list[tuple[int, str, Tensor]]] = {}
        for number, (unit, evidence) in enumerate(zip(self.units, gathered, strict=True)):
            for space, C in evidence.items():
                batches.setdefault(replace(unit.spaces[space], per=()), []).append((number, space, C))
        results: list[tuple[Elements, Tensor]] = [({}, torch.zeros((), dtype=torch.float64)) for _ in self.units]
        for group, members in batches.items():
            solved, scores = solve(group, torch.cat([C for _, _, C in members]))
            sizes = [len(C) for _, _, C in members]
            parts = zip(solved.cpu().split(sizes), scores.cpu().split(sizes), strict=True)
            for (number, space, _), (element, score) in zip(members, parts, strict=True):
                results[number] = ({**results[number][0], space: element}, results[number][1] + score.sum())
        for unit in self.units:
            self._done(unit)
        return results

    def _solve_unit(self, unit: Unit, around: Transform) -> tuple[Elements, Tensor]:
        if self._keeps_its_order(unit, around):
            self._done(unit)
            return {unit.root: unit.spaces[unit.root].identity()}, torch.zeros((), dtype=torch.float64)
        solved, score = unit.solve(self._blocks(unit, around))
        self._done(unit)
        return {s: e.cpu() for s, e in solved.items()}, score.cpu()

    def judged_by_weights(self, transform: Transform) -> Transform:
        """What the weights would do with the units that activations decided."""
        seen = [u for u in self.units if self.activations is not None and self.activations.speaks_of(u)]
        around = transform.only([RESIDUAL])
        solved = self.run(lambda u: u.solve(unit_blocks(self.pair, u.members, around, diagonal=u.diagonal))[0], seen)
        elements = {s: e.cpu() for unit in solved for s, e in unit.items() if transform.spaces[s].movable}
        kept = {s: e for s, e in transform.elements.items() if not any(s in u.members for u in seen)}
        return Transform(transform.spaces, {**kept, **elements})

    def _blocks(self, unit: Unit, around: Transform) -> list[Block]:
        blocks = unit_blocks(self.pair, unit.members, around, diagonal=unit.diagonal)
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

    def _done(self, unit: Unit) -> None:
        self.tick(self._bytes[unit.root], self._passes * sum(self._bytes.values()))

    # --- the residual stream ----------------------------------------------------------------------------------------
    def _stream_names(self) -> list[str]:
        return [n for n in self.names if RESIDUAL in self.pair.layouts[n].spaces()]

    def _stream_evidence(
        self, names: Iterable[str], moved: Transform, weights: Mapping[str, float] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Σ w · source × anchor over the stream's axis, added up in a fixed order."""
        weights = self._weights if weights is None else weights
        names = [n for n in names if weights.get(n, 0.0) > 0]
        total = torch.zeros(self.stream.size, self.stream.size, dtype=torch.float64)
        unsigned: Tensor | None = None
        window = 8  # bounds the number of d × d products alive at once
        for start in range(0, len(names), window):
            chunk = names[start : start + window]
            products = self.run(lambda n: stream_cross(self.pair, n, moved, RESIDUAL), chunk)
            for name, result in zip(chunk, products, strict=True):
                if result is None:
                    continue
                value, is_unsigned = result
                if not is_unsigned:
                    total.add_(value.cpu(), alpha=weights[name])
                elif self.stream.reorders:
                    term = value.cpu() * weights[name]
                    unsigned = term if unsigned is None else unsigned + term
        if unsigned is not None and not self.stream.signed:
            return total + unsigned, None
        return total, unsigned

    def _stream_word(self) -> str:
        return "weights" if self.activations is None else self.activations.word(RESIDUAL)

    def _with_activations(self, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weights and activations, each worth one per unit; next to activations alone, weights only settle ties."""
        word = self._stream_word()
        if word == "weights":
            return C, unsigned
        assert self.activations is not None and self.activations.stream is not None
        share = 1.0 if word == "mix" else TIE
        parts = {self._root_of(n) or n for n in self._stream_names() if self._weights[n] > 0}
        return share * C + len(parts) * self.activations.stream, None if unsigned is None else share * unsigned

    def _first_guess(self) -> Tensor:
        """From what speaks of the stream alone: activations, or else embeddings and heads.

        A partial isometry, since neither need span the stream.
        """
        C = None if self.activations is None or self._stream_word() == "weights" else self.activations.stream
        unsigned = None
        if C is None:
            names = [n for n in self._stream_names() if self._is_outer(n)]
            C, unsigned = self._stream_evidence(names, Transform(self.pair.architecture.spaces))
        start = SOLVERS[self.stream.name].start
        return self._best_for_stream(C, unsigned) if start is None else start(C)

    def _best_for_stream(self, C: Tensor, unsigned: Tensor | None) -> Tensor:
        return solve(self.stream, C[None], None if unsigned is None else unsigned[None])[0][0]

    def _is_whole(self, element: Tensor) -> bool:
        """Not a partial isometry."""
        return not self.stream.rotates or round(float(element.square().sum())) == self.stream.size

    def _stream_stays(self) -> bool:
        """Siblings: nothing discrete moves and the best rotation gains no more than noise would let it."""
        spaces = self.pair.architecture.spaces
        names = self._stream_names()
        discrete = self.stream.reorders
        if discrete and self._stream_word() != "weights":
            return self._is_home(*self._with_activations(*self._stream_evidence(names, Transform(spaces))))
        # No tensor says more of an order than its parameters do, however equal it is in both: one that nobody trained
        # must not outvote all the others.
        least = 0.5 if discrete else LEAST_CHANGE
        measured = self.run(lambda n: distance_weight(*self.pair.tensors(n), least), names)
        C, unsigned = self._stream_evidence(names, Transform(spaces), dict(zip(names, measured, strict=True)))
        parameters = sum(torch.Size(self.pair.layouts[n].shape).numel() for n in names)
        if discrete:
            return self._agrees_in_place(C, unsigned, parameters) or self._is_home(
                *self._stream_evidence(names, Transform(spaces))
            )
        _, score = solve(self.stream, C[None])
        gain = 2 * float(score[0] - C.diagonal().sum())
        return is_noise(gain, dimension(spaces, RESIDUAL), parameters)

    def _is_home(self, C: Tensor, unsigned: Tensor | None) -> bool:
        """No order of the stream is better than the one it has."""
        return self.stream.is_identity(self._best_for_stream(C, unsigned))

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
        spaces = self.pair.layouts[name].spaces() - {RESIDUAL}
        return self.pair.architecture.root(min(spaces)) if spaces else None

    def _is_outer(self, name: str) -> bool:
        """Embeddings and heads: the stream on one axis, rows without a space on another."""
        return self._own_root(name) is None and len(self.pair.layouts[name].shape) > 1

    def _tensor_weights(self) -> dict[str, float]:
        sizes = self.run(lambda name: _norms(*self.pair.tensors(name)), self.names)
        blocks: dict[str, float] = {}
        for name, size in zip(self.names, sizes, strict=True):
            block = self._root_of(name) or name
            blocks[block] = blocks.get(block, 0.0) + size
        sums = {name: blocks[self._root_of(name) or name] for name in self.names}
        return {name: 1 / size if size > 0 else 0.0 for name, size in sums.items()}

    def _unit_weights(self) -> dict[str, float]:
        if not self.stream.movable:
            return {u.root: 1.0 for u in self.units}
        return {u.root: next(self._weights[n] for n in self.names if self._own_root(n) == u.root) for u in self.units}


def _norms(source: Tensor, anchor: Tensor) -> float:
    """‖source‖ · ‖anchor‖"""
    return float(source.norm() * anchor.norm())
