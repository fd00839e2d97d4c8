"""What an alignment will take, from shapes alone: operations are counted, and timed on this machine.

Strangers: every sweep sums the evidence of each unit (2·p·n operations for p parameters that meet n units), solves it,
and does the same for the residual stream (2·p·d). Siblings are compared once, as they are. Products, rotations and
assignments are timed here, at sizes that take milliseconds, and carried over to the sizes of the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from isomerge import system
from isomerge.alignment.rounds import ROUNDS
from isomerge.alignment.scope import Scope
from isomerge.alignment.siblings import LARGE_MODEL, LEAST_SHARE
from isomerge.alignment.solve_pair import FEWER_DIGITS, kept_between_sweeps, rotates_the_stream
from isomerge.alignment.solvers.assignment import DIRECTIONS, assign, assign_roughly
from isomerge.alignment.units import Unit
from isomerge.architectures import describe
from isomerge.checkpoint.base import Checkpoint
from isomerge.results import Result
from isomerge.symmetry.architecture import is_stream
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.groups import Trivial

SWEEPS = {True: 5, False: 3}
"""What strangers mostly take where the stream rotates, and where it is put in another order (docs/benchmarks.md)."""
PASSES = 20
"""How often a number is widened, copied or added up on the way, besides products."""
UNITS, GROWTH = 1024, 2.3
"""Assignments are timed with so many units, and take longer by this power of them."""
WIDTH, HEAD = 256, 32
"""Rotations are timed in so many dimensions, and take longer by the third power."""
OVERHEAD = 0.005
"""Seconds for each unit, however small, every time it is solved."""
LATE = 30 * 2**20
"""Bytes of modules that are imported late, and of buffers."""


@dataclass
class AlignmentEstimate(Result):
    """What aligning one model to another takes, as far as headers tell."""

    strangers_seconds: float
    """Where nothing else runs. Most alignments of models trained apart take between half of it and twice as much."""
    siblings_seconds: float
    peak_memory_bytes: int
    """Between strangers; siblings take less."""


def estimate_alignment(model: Checkpoint, scope: Scope, *, threads: int, budget: int) -> AlignmentEstimate:
    """To align a model to another of its shape. `budget`: bytes that may be kept between sweeps, as in `solve_pair`.

    No weights are read.

    >>> model = isomerge.open_checkpoint("model-b")
    >>> found = estimate_alignment(model, Scope("full"), threads=2, budget=8 << 30)
    >>> found.siblings_seconds < found.strangers_seconds
    True
    """
    work, kept = _needs(model, scope, budget)
    workers = max(1, min(threads, work.units))
    at_once = min(workers, system.processors())
    speed = measured_speed()
    together, alone = work.seconds(speed)
    return AlignmentEstimate(
        together / at_once + alone,
        work.seconds_in_place(speed) / at_once,
        system.present_memory() + kept + work.memory(workers),
    )


def fitting_workers(model: Checkpoint, scope: Scope, *, threads: int, memory: int, budget: int) -> int:
    """How many of so many workers fit into `memory` bytes beside all else; at least one."""
    work, kept = _needs(model, scope, budget)
    alone = work.memory(0)
    left = memory - system.present_memory() - kept - alone
    return max(1, min(threads, left // max(1, work.memory(1) - alone)))


def _needs(model: Checkpoint, scope: Scope, budget: int) -> tuple[AlignmentWork, int]:
    """The work, and the bytes that are kept between sweeps."""
    bound = describe(model, untie=rotates_the_stream(scope))
    architecture = scope.restrict(bound.architecture)
    kept = kept_between_sweeps(architecture, [bound, bound])
    if kept > budget:
        kept = 0
    elif bound.parameters() < FEWER_DIGITS or bound.stored_precision == torch.float64:
        kept = kept * 2 // 3  # there is no second, shorter precision
    return counted(replace(bound, architecture=architecture)), kept


@dataclass
class AlignmentWork:
    """The work of one pass over all units and the stream."""

    numbers: int = 0
    evidence: float = 0.0
    """Operations of products of units with units."""
    turning: float = 0.0
    """Operations of one product of everything with the stream's basis; those of its cross-covariances are as many."""
    width: int = 0
    """Of a stream that moves."""
    rotates: bool = False
    """Or it is put in another order."""
    units: int = 0
    orders: list[int] = field(default_factory=list)
    """Sizes of the assignments."""
    rotations: list[tuple[int, int]] = field(default_factory=list)
    """How many rotations of which size are solved inside units."""
    scores: int = 0
    """How many units the largest matrix of scores has."""
    largest: int = 0
    """Numbers of the largest tensor."""

    def seconds(self, speed: Speed) -> tuple[float, float]:
        """Between strangers: of work that is shared by workers, and of what one does alone."""
        sweeps = SWEEPS[self.rotates] if self.width else 0
        turned = 2 if self.rotates else 1  # an order moves tensors without a product
        products = sweeps * (self.evidence + turned * self.turning) * speed.single
        products += (self.evidence + (1 + turned) * self.turning) * speed.double
        orders = sum((n / UNITS) ** GROWTH for n in self.orders) * (sweeps * speed.rough + speed.exact)
        inside = (sweeps + 1) * self._inside(speed)
        alone = 0.0
        if self.rotates:
            solved = sweeps * min(ROUNDS, max(1, self.units)) + 2  # also a first guess, and whether it stays at all
            alone = solved * speed.rotation * (self.width / WIDTH) ** 3
        rest = PASSES * self.numbers * speed.copy + (sweeps + 1) * self.units * OVERHEAD
        return products + orders + inside + rest, alone

    def seconds_in_place(self, speed: Speed) -> float:
        """Between siblings, which are compared as they are."""
        large = self.numbers >= LARGE_MODEL
        seconds = (self.evidence + self.turning) * speed.double + self._inside(speed)
        if large:  # a sample, and the proof that needs no scores
            seconds *= LEAST_SHARE
            seconds += sum(n**2 for n in self.orders) * (4 * DIRECTIONS * speed.single + PASSES * speed.copy)
        passes = 4 * PASSES if large else PASSES / 2  # every number comes from the file, past the cache
        seconds += passes * self.numbers * speed.copy + self.units * OVERHEAD
        return seconds + (self.width / WIDTH) ** 3 * speed.rotation

    def memory(self, workers: int) -> int:
        """Beside what is kept between sweeps: scores, or tensors in float64, and sums over the stream."""
        return LATE + workers * max(12 * self.scores**2, 16 * self.largest) + 16 * 8 * self.width**2

    def _inside(self, speed: Speed) -> float:
        return sum(count * (size / HEAD) ** 3 for count, size in self.rotations) * speed.head


def counted(model: BoundModel) -> AlignmentWork:
    """The work of a model of this shape."""
    spaces = model.architecture.spaces
    streams = {s: spaces[s] for s in model.architecture.streams}
    stream = max(streams.values(), key=lambda group: group.size, default=Trivial(0))
    work = AlignmentWork(width=stream.size if stream.movable else 0, rotates=stream.movable and not stream.reorders)
    numel = {name: math.prod(layout.shape) for name, layout in model.layouts.items()}
    work.numbers, work.largest = sum(numel.values()), max(numel.values(), default=0)
    for name, layout in model.layouts.items():
        if len(layout.shape) > 1:
            work.turning += sum(2.0 * numel[name] * streams[s].size for s in streams if s in layout.spaces())
    for root in [space for space, group in spaces.items() if not group.per and not is_stream(space)]:
        unit = Unit(root, spaces)
        if any(group.movable for group in unit.spaces.values()):
            _count_unit(work, unit, model, numel)
    return work


def _count_unit(work: AlignmentWork, unit: Unit, model: BoundModel, numel: dict[str, int]) -> None:
    root = unit.spaces[unit.root]
    work.units += 1
    for name in model.touching(unit.root):
        layout = model.layouts[name]
        for axis, segment in layout.segments_with(*unit.members):
            met = math.prod(segment.sizes)
            part = numel[name] * met / layout.shape[axis]  # queries, keys and values may be one tensor
            work.evidence += 2.0 * part * (met // segment.sizes[0] if unit.diagonal else met)
            work.scores = max(work.scores, 0 if unit.diagonal else met)
    if root.reorders:
        work.orders.append(root.size)
    pairs = root.size if unit.diagonal else root.size**2
    inner = [group for space, group in unit.spaces.items() if space != unit.root]
    work.rotations += [(pairs, group.size) for group in inner if group.element == "matrix"]


# --- this machine -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Speed:
    """Seconds of one processor."""

    single: float
    """For an operation of a product in float32."""
    double: float
    copy: float
    """Of a number in float64."""
    rotation: float
    """For one of `WIDTH` dimensions."""
    head: float
    """For one of `HEAD` dimensions, of many at once."""
    exact: float
    """For an assignment of `UNITS` units."""
    rough: float


@lru_cache(maxsize=1)
def measured_speed() -> Speed:
    """Timed now, in about a second."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    narrow, square, heads = random(512, 1024), random(WIDTH, WIDTH).double(), random(64, HEAD, HEAD).double()
    wide, scores = narrow.double(), random(UNITS, 256) @ random(256, UNITS)
    operations = 2 * 512 * 512 * 1024
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Speed(
            single=_seconds(lambda: narrow @ narrow.T) / operations,
            double=_seconds(lambda: wide @ wide.T) / operations,
            copy=_seconds(wide.clone) / wide.numel(),
            rotation=_seconds(lambda: torch.linalg.svd(square)),
            head=_seconds(lambda: torch.linalg.svdvals(heads)) / len(heads),
            exact=_seconds(lambda: assign(scores)),
            rough=_seconds(lambda: assign_roughly(scores)),
        )
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object]) -> float:
    """Of the processor, the least of five: how busy the machine is says nothing of the work."""
    times = []
    for _ in range(5):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
