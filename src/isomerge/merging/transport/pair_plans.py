"""The plans between two models: from activations at once, from weights by flowing through the network and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isomerge.alignment.scope import Scope
from isomerge.calibration import Batches
from isomerge.calibration.cross import CrossStatistics, cross_statistics
from isomerge.calibration.sites import Site
from isomerge.checkpoint.base import Progress
from isomerge.choices import SITES
from isomerge.errors import RequestError, did_you_mean
from isomerge.merging.transport.evidence import (
    UnitDistances,
    fixed_spaces,
    from_activations,
    from_weights,
    reads,
    start_of_stream,
)
from isomerge.merging.transport.plans import TransportPlans
from isomerge.merging.transport.solver import TransportSolver
from isomerge.merging.transport.unit_plans import HEADS, POLICIES, solve_unit, stream_plan
from isomerge.symmetry.architecture import RESIDUAL, Architecture, part_of
from isomerge.symmetry.binding import BoundModel

COSTS = ("activations", "weights")
SWEEPS = 5  # of the stream and the units, where weights decide for both


@dataclass
class TransportRequest:
    """What the user asked for."""

    solver: TransportSolver
    cost: str | None = None
    """None: activations where there is data."""
    residual: str = "joint"
    heads: str = "matched"
    only: str | None = None
    site: str = "post"
    batches: Batches | None = None
    device: str = "cpu"
    progress: Progress | None = None
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    """Squared distances within what a space is carried to, where that is not the anchor."""

    def __post_init__(self) -> None:
        if self.cost is None:
            self.cost = "weights" if self.batches is None else "activations"
        asked = [
            ("a cost", self.cost, COSTS), ("a policy for the residual stream", self.residual, POLICIES),
            ("a way to treat heads", self.heads, HEADS), ("a place in a feed-forward", self.site, SITES),
        ]  # fmt: skip
        wrong = [f"'{word}' is not {what}. {did_you_mean(str(word), known)}" for what, word, known in asked
                 if word not in known]  # fmt: skip
        if self.cost == "activations" and self.batches is None:
            wrong.append("cost='activations' needs data that both models can see. Give data, or use cost='weights'.")
        if wrong:
            raise RequestError("Transporting units: " + " ".join(wrong))
        self.scope = Scope("permutation", only=self.only)


@dataclass
class SolvedPlans:
    """The plans of a pair and how they came about."""

    plans: TransportPlans
    examples: int = 0
    notes: list[str] = field(default_factory=list)


def solve_plans(source: BoundModel, anchor: BoundModel, request: TransportRequest) -> SolvedPlans:
    """A plan for every space that may be permuted and that the request names."""
    moving = moving_of(anchor, request)
    require_transportable(source, anchor, moving)
    planner = PairPlanner(source, anchor, request, TransportPlans(moving))
    planner.require_heads()
    return planner.run()


def moving_of(anchor: BoundModel, request: TransportRequest) -> Architecture:
    """The groups that the request leaves to move."""
    moving = request.scope.restrict(anchor.architecture)
    return moving.frozen([RESIDUAL]) if request.residual == "identity" else moving


class PairPlanner:
    """One pair of models, while its plans are being found."""

    def __init__(
        self, source: BoundModel, anchor: BoundModel, request: TransportRequest, plans: TransportPlans
    ) -> None:
        self.source, self.anchor, self.request, self.plans = source, anchor, request, plans
        self.fixed = fixed_spaces(plans)
        architecture = plans.architecture
        self.roots = list(dict.fromkeys(
            architecture.root(s) for s in architecture.spaces if s not in self.fixed and s != RESIDUAL
        ))  # fmt: skip
        self.stream = RESIDUAL in architecture.spaces and RESIDUAL not in self.fixed
        self.notes: list[str] = []
        self.examples = 0

    def require_heads(self) -> None:
        """Across heads, each unit needs one place: not where units are shared between heads or must stay."""
        if self.request.heads != "across":
            return
        spaces = self.plans.architecture.spaces
        for root in (r for r in self.roots if part_of(r) == "attention"):
            inside = [s for s, group in spaces.items() if root in group.per]
            if any(s in self.fixed or "query" in s.split(".") for s in inside):
                raise RequestError(
                    f"Transporting units across heads: in '{root}' some units are tied to their head (grouped queries "
                    "or rotary positions). Use heads='matched'."
                )

    def run(self) -> SolvedPlans:
        if self.request.cost == "activations":
            seen = self._look()
            if self.stream:
                self._solve_stream(seen.pop(RESIDUAL))
            blind = [root for root in self.roots if not self._covers(root, seen.get(root, []))]
            self._solve_units({root: seen[root] for root in self.roots if root not in blind})
            if blind:
                self.notes.append(f"there are no activations for {', '.join(blind)}: the weights decide there")
                self._solve_units({root: self._weights(root) for root in blind})
        else:
            self._flow()
        if self.request.solver.unfinished:
            self.notes.append(
                f"{self.request.solver.unfinished} plans had not settled when the solver stopped; "
                "a larger regularisation settles sooner"
            )
        return SolvedPlans(self.plans, self.examples, self.notes)

    def evidence(self) -> dict[str, list[UnitDistances]]:
        """All of it, by root, where no plan has to be known: between a model and itself."""
        seen = self._look() if self.request.cost == "activations" else {}
        seen |= {root: self._weights(root) for root in self.roots if not self._covers(root, seen.get(root, []))}
        if self.stream and RESIDUAL not in seen:
            first, start = self._start(self._tables())
            seen[RESIDUAL] = [start, *self._weights(RESIDUAL, without=first)]
        return {root: [e.normalised() for e in found] if root == RESIDUAL else found for root, found in seen.items()}

    def _flow(self) -> None:
        """From the embeddings through the units and back to the stream, until nothing changes."""
        if not self.stream:
            self._solve_units({root: self._weights(root) for root in self.roots})
            return
        tables = self._tables()  # a narrow table comes before the stream
        self._solve_units({root: self._weights(root) for root in tables})
        if not self._first(tables):  # of an inferred architecture, whose tables may be known as readers only
            self.notes.append("nothing is known to write to the residual stream first, so it stays as it is")
            self.plans.outer[RESIDUAL] = torch.eye(self.plans.architecture.spaces[RESIDUAL].size, dtype=torch.float64)
            self._solve_units({root: self._weights(root) for root in self.roots})
            return
        first, start = self._start(tables)
        self.plans.outer[RESIDUAL] = stream_plan("first", [start], self.request.solver)
        for sweep in range(SWEEPS):
            self._solve_units({root: self._weights(root) for root in self.roots})
            before = self.plans.outer[RESIDUAL]
            if self.request.residual == "first":
                return
            self._solve_stream([start, *self._weights(RESIDUAL, without=first)])
            self._report(sweep + 1, SWEEPS)
            if bool(torch.allclose(before, self.plans.outer[RESIDUAL], rtol=0, atol=1e-9 / len(before))):
                return
        self._solve_units({root: self._weights(root) for root in self.roots})

    def _tables(self) -> list[str]:
        """Units that are looked up, so that their weights read from no other."""
        return [root for root in self.roots if not any(reads(root, self.anchor, self.plans).values())]

    def _start(self, tables: Sequence[str]) -> tuple[list[str], UnitDistances]:
        """The weights that write to the stream first, and what they say of its units."""
        first = self._first(tables)
        inside = self.request.solver.looks_inside
        return first, start_of_stream(first, self.source, self.anchor, self.plans, within=inside)

    def _first(self, tables: Sequence[str]) -> list[str]:
        """The weights that write to the stream and read from nothing but tables or, if there is none, what stays."""
        writers = reads(RESIDUAL, self.anchor, self.plans)
        for known in (set(tables), {*tables, *self.fixed}):
            if first := [name for name, read in writers.items() if read <= known]:
                return first
        return []

    def _covers(self, root: str, evidence: Sequence[UnitDistances]) -> bool:
        """Something is seen of a space and of every one inside it."""
        spaces = self.plans.architecture.spaces
        moving = {s for s in spaces if s not in self.fixed and self.plans.architecture.root(s) == root}
        return bool(evidence) and moving <= {s for e in evidence for s in e.spaces}

    def _weights(self, root: str, without: Sequence[str] = ()) -> list[UnitDistances]:
        """… of a space and those inside it, without what keeps its place."""
        inside = self.request.solver.looks_inside
        distances = from_weights(root, self.source, self.anchor, self.plans, without=without, within=inside)
        return self._reduced(root, distances)

    def _reduced(self, root: str, evidence: Iterable[UnitDistances]) -> list[UnitDistances]:
        inside = self.fixed - {root}
        return [e.without(inside) for e in evidence]

    def _solve_stream(self, evidence: Sequence[UnitDistances]) -> None:
        target = self.request.targets.get(RESIDUAL)
        self.plans.outer[RESIDUAL] = stream_plan(self.request.residual, evidence, self.request.solver, target)

    def _solve_units(self, evidence: dict[str, list[UnitDistances]]) -> None:
        for root, distances in evidence.items():
            heads = self.request.heads if part_of(root) == "attention" else "matched"
            how = "fixed" if root in self.fixed else heads
            solve_unit(root, distances, self.plans, self.request.solver, how, self.request.targets.get(root))

    def _look(self) -> dict[str, list[UnitDistances]]:
        """Run both models on the data: the evidence by root."""
        spaces = [s for s in self.plans.architecture.spaces if s not in self.fixed]
        roles = ("stream", "input", "output") if self.stream else ("input", "output")

        def crossed(source: BoundModel, anchor: BoundModel) -> CrossStatistics:
            return cross_statistics(
                source.checkpoint, anchor.checkpoint, self.request.batches, spaces=spaces, roles=roles,
                device=self.request.device, progress=self.request.progress,
            )  # fmt: skip

        statistics = crossed(self.source, self.anchor)
        inside = self.request.solver.looks_inside
        alone = [crossed(one, one) for one in (self.anchor, self.source)] if inside else []
        self.examples = statistics.examples
        seen: dict[str, list[UnitDistances]] = {}
        for name, site in statistics.sites.items():
            root = self.plans.architecture.root(site.spaces[0])
            if self._is_wanted(site, root, bool(seen.get(RESIDUAL))):
                grams = (alone[0].moments[name].cross, alone[1].moments[name].cross) if alone else None
                evidence = from_activations(site, statistics.moments[name], self.source, grams)
                seen.setdefault(root, []).append(evidence if root == RESIDUAL else evidence.normalised())
        return {root: self._reduced(root, evidence) for root, evidence in seen.items()}

    def _is_wanted(self, site: Site, root: str, started: bool) -> bool:
        if root == RESIDUAL:  # where it starts, and what is written to it
            if site.role == "stream":
                return site.kind == "in" and not started
            layout = self.anchor.layouts[site.name.split(":")[0]]
            spaces = [a.space for axis in layout.axes for segment in axis for a in segment.atoms]
            return site.role == "output" and spaces.count(RESIDUAL) == 1
        if part_of(root) == "ffn":
            return site.role == ("input" if self.request.site == "post" else "output")
        return True

    def _report(self, done: int, most: int) -> None:
        if self.request.progress:
            self.request.progress(done, most, "carrying units")


# --- can one model be carried to the other? ---------------------------------------------------------------------------
def require_transportable(source: BoundModel, anchor: BoundModel, moving: Architecture) -> None:
    """Raise unless only widths differ: depth, heads and what is looked up may not. `moving` has the groups that are
    left to move."""
    problems = []
    declared, other = anchor.architecture.spaces, source.architecture.spaces
    for only, one, two in (("anchor", anchor, source), ("source", source, anchor)):
        missing = [n for n in one.layouts if n not in two.layouts]
        if missing:
            problems.append(f"only the {only} has {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}")
    parents = {p for group in declared.values() if group.size > 1 for p in group.per}  # a size of 1 is only a scale
    for space, group in declared.items():
        size = other[space].size if space in other else group.size
        if size == group.size:
            continue
        sizes = f"{size} and {group.size}"
        counted = group.reorders and not group.signed and part_of(anchor.architecture.root(space)) == "attention"
        if RESIDUAL not in declared:
            problems.append(f"'{space}' has {sizes} units, and no specification says who reads them")
        elif counted or space in parents:
            problems.append(f"{space!r} has {sizes} units: numbers of heads, groups and experts must be equal")
        elif not moving.spaces[space].movable:
            problems.append(f"{space!r} has {sizes} units and stays as it is, so the numbers must be equal")
    for name in sorted(set(source.layouts) & set(anchor.layouts)):
        a, b = anchor.layouts[name], source.layouts[name]
        if a.pattern != b.pattern:
            problems.append(f"{name} is used differently in the two: check tie_word_embeddings and the head class")
            continue
        for axis, x in enumerate(a.axes):
            free = all(atom.free for segment in x for atom in segment.atoms)
            if free and a.shape[axis] != b.shape[axis]:
                word = x[0].atoms[0].space.lstrip("_") or "entries"
                problems.append(f"{name} has {b.shape[axis]} and {a.shape[axis]} {word}")
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise RequestError(
            f"Transporting {source.name} to {anchor.name}: {shown}. Widths may differ, but the architecture, the "
            "depth, the heads and the vocabulary must be the same."
        )
