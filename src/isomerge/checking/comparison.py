"""Every pair of models in one pass over samples of their tensors, and each of them against their base."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, is_harmless_buffer
from isomerge.kinship import PairSums, are_related, place_of, relative_distance
from isomerge.merging.plan.model_parts import natural

OUTSIDE = "outside the layers"
MOST_VALUES = 24_000_000  # of one model in all: whatever its size, a check takes seconds
MOST_OF_ONE, LEAST_OF_ONE = 1 << 18, 1 << 11
PIECES = 8  # a tensor is looked at in so many places
SQUARES = 1e-24, 1e24  # of a weight on average: sums of smaller or larger ones do not fit float32


# --- the same values of several models, spread over each tensor, few enough to read in seconds ------------------------
@dataclass(frozen=True)
class Sample:
    """Values of one tensor, model by model; every value stands for `scale` of them."""

    name: str
    matrix: bool
    """Not a vector: gains near one and biases near zero say little about who descends from whom."""
    values: list[Tensor]
    scale: float
    same: list[bool]
    """Which models have, in every sampled bit, what the first has."""
    bad: list[int]
    """How many values of each model are NaN or infinite; they count as zero."""


def shared_tensors(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The weights that all have, in one shape but perhaps with tables of different lengths."""
    return [
        name
        for name, info in checkpoints[0].tensors.items()
        if not is_harmless_buffer(name) and all(_comparable(info.shape, name, c) for c in checkpoints)
    ]


def _comparable(shape: tuple[int, ...], name: str, other: Checkpoint) -> bool:
    info = other.tensors.get(name)
    return (
        info is not None
        and info.dtype.is_floating_point
        and info.dtype.itemsize > 1
        and len(info.shape) == len(shape)
        and info.shape[1:] == shape[1:]
    )


def samples(checkpoints: Sequence[Checkpoint]) -> Iterator[Sample]:
    """One sample of every shared tensor."""
    names = shared_tensors(checkpoints)
    most = max(LEAST_OF_ONE, min(MOST_OF_ONE, MOST_VALUES // max(1, len(names))))
    for name in names:
        shapes = [c.tensors[name].shape for c in checkpoints]
        count = min(math.prod(shape) for shape in shapes)
        if count:
            yield _sample(checkpoints, name, spans(count, most), count, len(shapes[0]) > 1)


def spans(count: int, most: int) -> list[tuple[int, int]]:
    """Places to look at among `count` values: all of them, or some pieces spread evenly.

    >>> spans(100, 1000), spans(1000, 16)[:2]
    ([(0, 100)], [(0, 2), (142, 144)])
    """
    if count <= most:
        return [(0, count)]
    length = max(1, most // PIECES)
    return [(start, start + length) for start in (k * (count - length) // (PIECES - 1) for k in range(PIECES))]


def _sample(
    checkpoints: Sequence[Checkpoint], name: str, places: list[tuple[int, int]], count: int, matrix: bool
) -> Sample:
    stored = [c.read_spans(name, places) for c in checkpoints]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in stored) else torch.float32
    same = [t.dtype == stored[0].dtype and torch.equal(t, stored[0]) for t in stored]
    values, bad = [], []
    for tensor in stored:
        number = tensor.to(wide)
        broken = 0 if math.isfinite(float(number.sum())) else int((~number.isfinite()).sum())
        values.append(number.nan_to_num(0.0, 0.0, 0.0) if broken else number)
        bad.append(broken)
    return Sample(name, matrix, values, count / len(values[0]), same, bad)


# --- what they say ----------------------------------------------------------------------------------------------------
@dataclass
class PairComparison:
    """What the samples of two models say. Distances are from the first model; `from_second` where that is the base."""

    from_second: bool = False
    all: PairSums = field(default_factory=PairSums)
    changes: PairSums = field(default_factory=PairSums)  # of both from the base, where there is one
    layers: dict[str, PairSums] = field(default_factory=lambda: defaultdict(PairSums))
    layer_matrices: dict[str, PairSums] = field(default_factory=lambda: defaultdict(PairSums))
    layer_changes: dict[str, PairSums] = field(default_factory=lambda: defaultdict(PairSums))
    identical: list[str] = field(default_factory=list)
    identical_matrices: int = 0
    differing: dict[str, float] = field(default_factory=dict)  # matrices, with ‖A − B‖² per weight
    odd_sizes: list[tuple[str, float]] = field(default_factory=list)  # tensors whose norms differ much

    @property
    def is_same(self) -> bool:
        return self.all.apart == 0 and self.all.count > 0

    @property
    def counted(self) -> PairSums:
        """Over the tensors that count by `isomerge.kinship`: the matrices of the layers, where there are any."""
        inside = [sums for name, sums in self.layer_matrices.items() if name != OUTSIDE]
        return sum(inside or self.layer_matrices.values(), PairSums()) if self.layer_matrices else self.all

    @property
    def are_related(self) -> bool:
        """By the cosine; or because a tenth of the matrices, two at least, are the same bit for bit: no two trainings
        do that."""
        matrices = self.identical_matrices + len(self.differing)
        return are_related(self.counted.cosine) or self.identical_matrices >= max(2, matrices / 10)

    @property
    def is_extreme(self) -> bool:
        """Weights so small or so large that their products need float64."""
        least, most = SQUARES
        return any(not least < size / self.all.count < most for size in (self.all.first, self.all.second) if size)

    def distance(self, sums: PairSums) -> float | None:
        return relative_distance(sums.apart, sums.second if self.from_second else sums.first)

    def layer_distances(self) -> dict[str, float]:
        """By layer; infinite from a layer that is all zero."""
        return {row["name"]: math.inf if row["distance"] is None else row["distance"] for row in self.layer_rows()}

    def layer_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, sums in sorted(self.layers.items(), key=lambda item: natural(item[0])):
            own = self.layer_matrices.get(name, sums)
            row = {
                "name": name,
                "distance": self.distance(own),
                "cosine": own.cosine,
                "sign_conflict": sums.sign_conflict,
                "norm_ratio": sums.norm_ratio,
            }
            if name in self.layer_changes:
                changes = self.layer_changes[name]
                row |= {"change_cosine": changes.cosine, "change_conflict": changes.change_conflict}
            rows.append(row)
        return rows

    def add(self, sample: Sample, i: int, j: int) -> None:
        """Count a tensor of the models at places `i` and `j`."""
        sums = PairSums.of(sample.values[i], sample.values[j], sample.scale)
        layer = layer_of(sample.name)
        self.all += sums
        self.layers[layer] += sums
        if sample.matrix:
            self.layer_matrices[layer] += sums
        if sums.apart == 0 and sample.same[i] == sample.same[j]:
            self.identical.append(sample.name)
            self.identical_matrices += sample.matrix and sums.first > 0
        elif sample.matrix:
            self.differing[sample.name] = sums.apart / sums.count
        if sample.matrix and (sums.first or sums.second) and not (sample.bad[i] or sample.bad[j]):
            ratio = math.inf if sums.norm_ratio is None else sums.norm_ratio
            if not 2 / 3 < ratio < 3 / 2:
                self.odd_sizes.append((sample.name, ratio))

    def add_changes(self, sample: Sample, i: int, j: int) -> None:
        """The same of what both have added to the base, which is the last model of the sample."""
        origin = sample.values[-1]
        changes = PairSums.of(sample.values[i] - origin, sample.values[j] - origin, sample.scale)
        self.changes += changes
        self.layer_changes[layer_of(sample.name)] += changes


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
    ('model.layers.3', 'outside the layers')
    """
    stack, layer, _ = place_of(name)
    return f"{stack}.{layer}".lstrip(".") if layer >= 0 else OUTSIDE


@dataclass
class Comparisons:
    """All that one pass over the samples measured."""

    pairs: dict[tuple[int, int], PairComparison]
    from_base: list[PairComparison]
    tensors: int = 0
    values: float = 0.0
    sampled: int = 0
    not_finite: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By model, its tensors with NaN or infinite values."""


def compare(models: Sequence[Checkpoint], base: Checkpoint | None) -> Comparisons:
    """Read the samples once; sum them for every pair."""
    everyone = [*models, *([base] if base is not None else [])]
    result = Comparisons(
        {pair: PairComparison() for pair in combinations(range(len(models)), 2)},
        [PairComparison(from_second=True) for _ in models] if base is not None else [],
    )
    for sample in samples(everyone):
        result.tensors += 1
        result.values += sample.scale * len(sample.values[0])
        result.sampled += len(sample.values[0])
        for model, count in zip(everyone, sample.bad, strict=True):
            if count:
                result.not_finite[model.name].append(sample.name)
        for (i, j), comparison in result.pairs.items():
            comparison.add(sample, i, j)
            if base is not None:
                comparison.add_changes(sample, i, j)
        for i, comparison in enumerate(result.from_base):
            comparison.add(sample, i, len(everyone) - 1)
    return result
