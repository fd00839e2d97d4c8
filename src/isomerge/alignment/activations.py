"""Evidence from activations: both models see the same data, and C = Σ x_B x_Aᵀ takes the place of weights.

Where the stream of the source is g times that of the anchor, so is every activation in it, and Procrustes on the
activations finds g without knowing anything about the units that write to it. That is why the residual stream, whose
weights only speak once every unit is in place, is the space that activations help most.

Activations are seen in the coordinates of the files, and units are solved in balanced ones: both balances move C. What
has no activations, or is a tie in them (units that never fire), is left to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.evidence import Block, Pair, add_blocks, of_one_root, weight_bounds
from isomerge.alignment.units import Unit
from isomerge.arguments import require_choice
from isomerge.calibration.cross import MOST_NATS, CrossMoments, cross_statistics
from isomerge.calibration.sites import Site
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.choices import EVIDENCE, MEASURES, SITES
from isomerge.data import open_data
from isomerge.errors import RequestError, did_you_mean
from isomerge.symmetry.architecture import RESIDUAL, Architecture, Norm, is_stream, layer_of, part_of
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Atom, Layout, Segment
from isomerge.symmetry.transform import Transform

TIE = 1e-6  # the share of the weights beside activations: enough to settle what those leave open, and nothing else

SeenSites = tuple[list[tuple[Site, CrossMoments]], int, Mapping[str, str], list[str]]
"""The cross moments of a pair in the coordinates of the files, how many examples, what decides for each space, and what
was cut or missing in the data."""


@dataclass
class ActivationRequest:
    """What the user asked for: data, and which spaces it decides. `evidence=None`: the residual stream."""

    data: Any
    evidence: str | Mapping[str, str] | None = None
    measure: str = "covariance"
    site: str = "post"
    limit: int | None = None
    progress: Progress | None = None
    _seen: dict[tuple[int, int], SeenSites] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = list(self.evidence.values()) if isinstance(self.evidence, Mapping) else [self.evidence or "weights"]
        for word in words:
            require_choice("evidence", word, EVIDENCE)
        require_choice("measure", self.measure, MEASURES)
        require_choice("site", self.site, SITES)
        if self.data is None and (self.limit is not None or any(w != "weights" for w in words)):
            raise RequestError(
                "Aligning by activations: there is no data to see them on. Pass data, or leave evidence and limit out "
                "to align by the weights alone."
            )

    def words(self, architecture: Architecture) -> dict[str, str]:
        """The evidence for each space: named for it, for the space it is nested in or for its part, or the default."""
        spaces = architecture.spaces
        if isinstance(self.evidence, str):
            return dict.fromkeys(spaces, self.evidence)
        named = self.evidence or {}
        names = {s: _names(s, architecture) for s in spaces}
        unknown = [k for k in named if not any(_matches(k, name) for aliases in names.values() for name in aliases)]
        if unknown:
            known = sorted({name for aliases in names.values() for name in aliases})
            what = " ".join(f"no space is called '{k}'. {did_you_mean(k, known)}" for k in unknown)
            raise RequestError(f"Aligning with evidence per space: {what}")
        default = {RESIDUAL: "weights" if self.data is None else "activations"}
        return {
            space: next((named[k] for n in aliases for k in named if _matches(k, n)), default.get(space, "weights"))
            for space, aliases in names.items()
        }

    def evidence_for(
        self, source: Checkpoint, anchor: Checkpoint, model: BoundModel, balances: tuple[Transform, Transform]
    ) -> Activations:
        """The activations of a pair as the balanced forms would have them. The data is read once, however often the
        pair is solved."""
        key = (id(source), id(anchor))
        if key not in self._seen:
            self._seen[key] = self._look(source, anchor, model)
        sites, examples, words, notes = self._seen[key]
        architecture = model.architecture
        blocks: dict[str, list[Block]] = {}
        stream: list[Tensor] = []
        used: set[str] = set()
        for site, moments in sites:
            if any(s not in architecture.spaces for s in site.spaces):
                continue
            measure = self._measure(site, architecture)
            used.add(measure)
            if site.spaces == (RESIDUAL,):
                value = normalised(moments, measure)
                stream += [value] if bool(value.any()) else []
                continue
            value = _balanced(measured(moments, measure), site.segment, balances)
            block = Block(site.spaces, False, value.reshape(1, *site.sizes, *site.sizes))
            blocks.setdefault(architecture.root(site.spaces[0]), []).append(block)
        total = torch.stack(stream).mean(0) if stream else None
        seen = {root: add_blocks(own) for root, own in blocks.items()}
        if used and self.measure not in used:
            notes = [*notes, f"covariance decides: measure '{self.measure}' is for spaces that only change their order"]
        return Activations(architecture, words, total, seen, examples, list(notes))

    def _measure(self, site: Site, architecture: Architecture) -> str:
        """Inside heads only the covariance means something: bases and biases are free there."""
        groups = [architecture.spaces[s] for s in site.spaces]
        discrete = all(g.reorders or not g.movable for g in groups)
        fits = {"correlation": discrete, "information": discrete, "l2": len(groups) == 1}
        return self.measure if fits.get(self.measure, True) else "covariance"

    def _look(self, source: Checkpoint, anchor: Checkpoint, model: BoundModel) -> SeenSites:
        architecture = model.architecture
        words = self.words(architecture)
        wanted = [s for s in architecture.movable() if words[s] != "weights"]
        units = [s for s in wanted if not is_stream(s)]
        passes: list[tuple[list[str], tuple[str, ...]]] = []
        if RESIDUAL in wanted:
            passes.append(([RESIDUAL], _stream_roles(model)))
        if units:
            passes.append((units, ("input", "output")))
        sites: list[tuple[Site, CrossMoments]] = []
        examples = 0
        notes: list[str] = []
        batches = self._batches(anchor)
        for spaces, roles in passes:  # apart, or everything written to the stream would be kept for the units
            statistics = cross_statistics(
                source, anchor, batches, spaces=spaces, roles=roles, device=model.device, limit=self.limit,
                progress=self.progress,
            )  # fmt: skip
            examples = statistics.examples
            notes += [note for note in statistics.notes if note not in notes]
            sites += [(site, statistics.moments[name]) for name, site in statistics.sites.items()]
        sites = [(s, m) for s, m in sites if self._is_wanted(s, architecture)]
        return sites, examples, words, notes

    def _batches(self, checkpoint: Checkpoint) -> Callable[[], Iterator[dict[str, Tensor]]]:
        if callable(self.data):
            return self.data  # type: ignore[no-any-return]
        return open_data(self.data).passes(checkpoint, limit=self.limit)

    def _is_wanted(self, site: Site, architecture: Architecture) -> bool:
        if site.role == "stream":  # normalised, every token counts the same
            return site.name.removesuffix(":in") not in _in_front(architecture)
        if part_of(architecture.root(site.spaces[0])) != "ffn":
            return True
        return site.role == ("input" if self.site == "post" else "output")


@dataclass
class Activations:
    """Evidence for the sweep: one matrix for the stream, and blocks for every unit that was seen."""

    architecture: Architecture
    words: Mapping[str, str]
    stream: Tensor | None
    blocks: Mapping[str, list[Block]]
    examples: int
    notes: list[str] = field(default_factory=list)
    _scales: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = [s for s in self.architecture.movable() if self.words[s] != "weights"]
        unseen = [s for s in asked if not self._sees(s)]
        if len(unseen) < len(asked):
            self.notes.append(f"activations of {self.examples} examples decide: {_listed(set(asked) - set(unseen))}")
        if unseen:
            self.notes.append(f"there are no activations for {_listed(unseen)}: the weights decide there")

    def _sees(self, space: str) -> bool:
        if is_stream(space):  # of several streams, none is asked
            return space == RESIDUAL and self.stream is not None
        return any(space in b.spaces for b in self.blocks.get(self.architecture.root(space), []))

    def word(self, space: str) -> str:
        """What decides for a space in the end."""
        return self.words[space] if self._sees(space) else "weights"

    def roots(self) -> list[str]:
        """Of the units that activations have a say in."""
        spaces = [s for s in self.architecture.movable() if not is_stream(s) and self.word(s) != "weights"]
        return sorted({self.architecture.root(s) for s in spaces})

    def speaks_of(self, unit: Unit) -> bool:
        return unit.root in self.roots()

    def combined(self, unit: Unit, weights: list[Block], pair: Pair) -> list[Block]:
        """The blocks of a unit: those of the weights, replaced or joined by those of the activations."""
        own = [b for b in self._of(unit) if self.word(b.spaces[-1]) != "weights"]
        scale = self._scale(unit, own, pair) if own else 0.0
        if scale == 0:
            return weights
        share = {"weights": 1.0, "mix": 1.0, "activations": TIE}
        kept = [replace(b, value=b.value * share[self.word(b.spaces[-1])]) for b in weights]
        return add_blocks([*kept, *(replace(b, value=(b.value * scale).to(kept[0].value.device)) for b in own)])

    def _scale(self, unit: Unit, own: list[Block], pair: Pair) -> float:
        """Makes what the activations' own best element earns equal to the most that the weights they join could."""
        if unit.root not in self._scales:
            bounds = weight_bounds(pair, unit.members)
            most = sum(value for spaces, value in bounds.items() if self.word(spaces[-1]) != "weights")
            best = float(unit.solve([replace(b, value=b.value.clone()) for b in own])[1])  # a solver may spoil them
            self._scales[unit.root] = most / best if best > 0 else 0.0
        return self._scales[unit.root]

    def _of(self, unit: Unit) -> list[Block]:
        blocks = self.blocks.get(unit.root, [])
        return [replace(b, value=of_one_root(b.value, b.depth)) for b in blocks] if unit.diagonal else blocks


def measured(moments: CrossMoments, measure: str) -> Tensor:
    if measure == "l2":
        return moments.cross / moments.count
    if measure == "information":
        return moments.information()
    return moments.correlation() if measure == "correlation" else moments.covariance()


def normalised(moments: CrossMoments, measure: str) -> Tensor:
    """… divided by what equal activations would have, so that every layer counts the same."""
    if measure == "correlation":
        return moments.correlation() / len(moments.sum_a)
    if measure == "information":
        return moments.information() / (len(moments.sum_a) * MOST_NATS)
    sizes = []
    for total, squares in ((moments.sum_b, moments.squares_b), (moments.sum_a, moments.squares_a)):
        mean = 0 if measure == "l2" else (total / moments.count).square()
        sizes.append(float((squares / moments.count - mean).sum()))
    size = (max(sizes[0], 0) * max(sizes[1], 0)) ** 0.5
    value = measured(moments, measure)
    return value / size if size > 0 else torch.zeros_like(value)


def _balanced(value: Tensor, segment: Segment, balances: tuple[Transform, Transform]) -> Tensor:
    """S_B C S_Aᵀ: activations of both models as their balanced forms would have them."""
    plain = Segment(segment.atoms, segment.sizes, None)
    free = Segment((Atom("_samples"),), (len(value),), None)
    value = balances[0].act(value, Layout("", tuple(value.shape), ((plain,), (free,))))
    return balances[1].act(value, Layout("", tuple(value.shape), ((free,), (plain,))))


def _in_front(architecture: Architecture) -> set[str]:
    """Weights of norms that stand in front of their readers: the stream is seen normalised there."""
    return {n.name + ".weight" for n in architecture.norms if isinstance(n, Norm)}


def _stream_roles(model: BoundModel) -> tuple[str, ...]:
    """Norms on the stream, or after a branch, show it as it is; where there are none, that need not be kept."""
    atoms = {n: lay.axes[0][0].atoms for n, lay in model.layouts.items() if len(lay.axes) == 1}
    norms = {n for n, first in atoms.items() if first[0].space == RESIDUAL and first[0].unsigned}
    return ("normed",) if norms <= _in_front(model.architecture) else ("normed", "stream")


def _names(space: str, architecture: Architecture) -> list[str]:
    """What a space may be called, the nearest first: its name, its kind, those of what it is nested in, its part."""
    lineage = [space, *reversed(architecture.spaces[space].per)]
    return [*dict.fromkeys(name for s in lineage for name in (s, _kind(s))), part_of(architecture.root(space))]


def _kind(space: str) -> str:
    """Its name without the layer."""
    return space if layer_of(space) is None else space.rpartition(".")[0]


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def _listed(spaces: Any) -> str:
    """Kinds of spaces rather than every layer's: 'ffn.*, residual'."""
    return ", ".join(sorted({f"{_kind(s)}.*" if _kind(s) != s else s for s in spaces}))
