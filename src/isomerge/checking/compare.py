"""Every pair of models in one pass over the samples, and each of them against their base."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from isomerge.checking.samples import Sample, layer_of, samples
from isomerge.checking.sums import Sums
from isomerge.checkpoint import Checkpoint
from isomerge.merging.plan.model_parts import natural

OUTSIDE = "outside the layers"
SQUARES = 1e-24, 1e24  # of a weight on average: sums of smaller or larger ones do not fit float32


@dataclass
class Comparison:
    """What the samples of two models say."""

    all: Sums = field(default_factory=Sums)
    matrices: Sums = field(default_factory=Sums)
    changes: Sums = field(default_factory=Sums)  # of both from the base, where there is one
    layers: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    layer_matrices: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    layer_changes: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    identical: list[str] = field(default_factory=list)
    identical_matrices: int = 0
    differing: dict[str, float] = field(default_factory=dict)  # matrices, with ‖A − B‖² per weight
    odd_sizes: list[tuple[str, float]] = field(default_factory=list)  # tensors whose norms differ much

    @property
    def same(self) -> bool:
        return self.all.apart == 0 and self.all.count > 0

    @property
    def shares_tensors(self) -> bool:
        """A tenth of the matrices, two at least, are the same bit for bit: no two trainings do that."""
        return self.identical_matrices >= max(2, (self.identical_matrices + len(self.differing)) / 10)

    @property
    def kinship(self) -> Sums:
        """Of the matrices, where there are any: gains near one are alike between strangers too."""
        return self.matrices if self.matrices.count else self.all

    @property
    def cosine(self) -> float | None:
        return self.kinship.cosine

    @property
    def extreme(self) -> bool:
        """Weights so small or so large that their products need float64."""
        least, most = SQUARES
        return any(not least < size / self.all.count < most for size in (self.all.first, self.all.second) if size)

    def layer_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, sums in sorted(self.layers.items(), key=lambda item: natural(item[0])):
            row = {"name": name, **sums.record()}
            if name in self.layer_matrices:
                row["cosine"] = self.layer_matrices[name].cosine
            if name in self.layer_changes:
                changes = self.layer_changes[name]
                row |= {"change_cosine": changes.cosine, "change_conflict": changes.changed_conflict}
            rows.append(row)
        return rows


@dataclass
class Compared:
    """All that one pass over the samples found."""

    pairs: dict[tuple[int, int], Comparison]
    from_base: list[Comparison]
    tensors: int = 0
    values: float = 0.0
    sampled: int = 0
    bad: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # model → tensors with NaN


def compare(models: Sequence[Checkpoint], base: Checkpoint | None) -> Compared:
    """Read the samples once; sum them for every pair."""
    everyone = [*models, *([base] if base is not None else [])]
    found = Compared(
        {pair: Comparison() for pair in combinations(range(len(models)), 2)},
        [Comparison() for _ in models] if base is not None else [],
    )
    for sample in samples(everyone):
        found.tensors += 1
        found.values += sample.scale * len(sample.values[0])
        found.sampled += len(sample.values[0])
        for model, count in zip(everyone, sample.bad, strict=True):
            if count:
                found.bad[model.name].append(sample.name)
        for (i, j), comparison in found.pairs.items():
            _add(comparison, sample, i, j)
            if base is not None:
                _add_changes(comparison, sample, i, j)
        for i, comparison in enumerate(found.from_base):
            _add(comparison, sample, i, len(everyone) - 1)
    return found


def _add(comparison: Comparison, sample: Sample, i: int, j: int) -> None:
    sums = Sums.of(sample.values[i], sample.values[j], sample.scale)
    layer = layer_of(sample.name) or OUTSIDE
    comparison.all += sums
    comparison.layers[layer] += sums
    if sample.matrix:
        comparison.matrices += sums
        comparison.layer_matrices[layer] += sums
    if sums.apart == 0 and sample.same[i] == sample.same[j]:
        comparison.identical.append(sample.name)
        comparison.identical_matrices += sample.matrix and sums.first > 0
    elif sample.matrix:
        comparison.differing[sample.name] = sums.apart / sums.count
    if sample.matrix and (sums.first or sums.second) and not (sample.bad[i] or sample.bad[j]):
        ratio = math.inf if sums.norm_ratio is None else sums.norm_ratio
        if not 2 / 3 < ratio < 3 / 2:
            comparison.odd_sizes.append((sample.name, ratio))


def _add_changes(comparison: Comparison, sample: Sample, i: int, j: int) -> None:
    origin = sample.values[-1]
    changes = Sums.of(sample.values[i] - origin, sample.values[j] - origin, sample.scale)
    comparison.changes += changes
    comparison.layer_changes[layer_of(sample.name) or OUTSIDE] += changes
