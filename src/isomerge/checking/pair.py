"""One pair of models: identical, siblings or strangers, with the numbers and the reasons in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.checking.comparison import OUTSIDE, PairComparison
from isomerge.checking.stream import is_more_than_chance
from isomerge.checking.units import UnitMoves, judge_units
from isomerge.checkpoint import Checkpoint, is_harmless_buffer
from isomerge.checkpoint.base import name_some
from isomerge.kinship import IDENTICAL, SIBLINGS, STRANGERS
from isomerge.results import Result

NEAR = 0.5  # distance below which the layer that changed most tells whether any unit changed its place
LARGE = 200_000_000  # parameters of a model of which one layer is enough


@dataclass
class LowRankDifference(Result):
    """Two models whose difference is that of an adapter."""

    rank: int
    energy: float
    """The share of the difference that these directions hold, where it is least."""
    tensors: list[str]
    """Where it was looked at."""


@dataclass
class AlignmentGain(Result):
    """What an alignment would do for a pair."""

    helps: bool
    level: str | None
    """The lowest that is enough; None where it does not help."""
    gain: dict[str, float]
    """By level: the share of the squared distance that it takes away in the sampled layers."""
    by_chance: float | None
    """What it would take away between unrelated weights."""


@dataclass
class PairCheck(Result):
    """What `check` says of two models, or of a model and its base."""

    models: list[str]
    verdict: str
    """"identical", "siblings" or "strangers"."""
    reasons: list[str]
    distance: float | None
    """Of the second model from the first, or of a model from its base; as `isomerge.kinship` defines it."""
    cosine: float | None
    sign_conflict: float
    """The share of all weights whose signs differ."""
    norm_ratio: float | None
    """How many times as large the first model is, over all weights."""
    change_cosine: float | None
    """The cosine of what both have added to the base."""
    change_conflict: float | None
    """Of the weights that both changed, the share that went opposite ways."""
    identical_tensors: int
    low_rank: LowRankDifference | None
    alignment_helps: bool
    alignment: AlignmentGain
    layers: list[dict[str, Any]]
    spaces: list[dict[str, Any]]

    @property
    def gain(self) -> float:
        """The share of the squared distance that alignment at level full takes away in the sampled layers."""
        return self.alignment.gain.get("full", 0.0)


def judge_pair(first: Checkpoint, second: Checkpoint, comparison: PairComparison) -> PairCheck:
    """The record of a pair. Against a base no units are assigned where every layer is near: none has changed its place
    then."""
    layers = comparison.layer_distances()
    settled = comparison.is_same or (comparison.from_second and all(distance < NEAR for distance in layers.values()))
    models = (second, first) if comparison.from_second else (first, second)  # distances are from the one before
    moves = UnitMoves() if settled else judge_units(*models, _sampled_layers(comparison), comparison.is_extreme)
    if comparison.is_same and _shapes(first) == _shapes(second):
        verdict = IDENTICAL
    else:
        verdict = SIBLINGS if comparison.are_related and not moves.displaced else STRANGERS
    low = low_rank_difference(first, second, comparison.differing) if verdict == SIBLINGS else None
    helps = verdict == STRANGERS
    counted = comparison.counted
    return PairCheck(
        models=[first.name, second.name],
        verdict=verdict,
        reasons=_reasons(verdict, comparison, moves, low),
        distance=comparison.distance(counted),
        cosine=counted.cosine,
        sign_conflict=comparison.all.sign_conflict,
        norm_ratio=comparison.all.norm_ratio,
        change_cosine=comparison.changes.cosine,
        change_conflict=comparison.changes.change_conflict,
        identical_tensors=len(comparison.identical),
        low_rank=low,
        alignment_helps=helps,
        alignment=AlignmentGain(helps, moves.level if helps else None, moves.gain, moves.by_chance),
        layers=comparison.layer_rows(),
        spaces=moves.spaces,
    )


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in checkpoint.tensors.items() if not is_harmless_buffer(name)}


def _sampled_layers(comparison: PairComparison) -> set[int]:
    """The layers whose units are assigned: the middle one and, of small models, the last; of near models the worst."""
    by_layer = {_number(name): far for name, far in comparison.layer_distances().items() if name != OUTSIDE}
    if not by_layer:
        return set()
    distance = comparison.distance(comparison.counted)
    if distance is not None and distance < NEAR:
        return {max(by_layer, key=lambda layer: by_layer[layer])}
    numbers = sorted(by_layer)
    return {numbers[len(numbers) // 2], *([numbers[-1]] if comparison.all.count < LARGE else [])}


def _number(layer: str) -> int:
    return int(layer.rpartition(".")[2])


def _reasons(verdict: str, comparison: PairComparison, moves: UnitMoves, low: LowRankDifference | None) -> list[str]:
    if verdict == IDENTICAL:
        return ["every sampled value is the same, bit for bit"]
    distance = comparison.distance(comparison.counted)
    near = f"cosine {comparison.counted.cosine or 0.0:.3g}"
    if distance is not None:
        near = f"relative distance {distance:.3g}, {near}"
    if verdict == SIBLINGS:
        reasons = [f"{near}{_in_place(moves)}"]
    elif moves.spaces:
        reasons = [f"{near}; {len(moves.wanting)} of {len(moves.spaces)} sampled spaces would move", *_gain(moves)]
    else:
        reasons = [near]
    if comparison.identical and verdict == SIBLINGS:
        reasons.append(f"{len(comparison.identical)} tensors are the same in both, as far as they were sampled")
    if low is not None:
        reasons.append(
            f"their difference is that of an adapter: {low.rank} directions hold {100 * low.energy:.0f} % of it "
            f"in {name_some(low.tensors, 2)}"
        )
    if comparison.odd_sizes:
        reasons.append(_odd(comparison.odd_sizes))
    return [*reasons, *dict.fromkeys(moves.notes)]


def _in_place(moves: UnitMoves) -> str:
    if not moves.spaces:
        return ""
    if moves.wanting:
        return "; units are in their places, as far as they gain no more by changing them than random ones would"
    return "; every sampled unit is already in its best place"


def _odd(sizes: list[tuple[str, float]]) -> str:
    """How many tensors differ much in size, and the one that differs most."""
    name, ratio = max(sizes, key=lambda one: max(one[1], 1 / one[1]) if one[1] else math.inf)
    most = f"is {ratio:.2g} times as large" if 0 < ratio < math.inf else "is all zero in one of the two"
    return f"{len(sizes)} tensors differ much in size; {name} {most}"


def _gain(moves: UnitMoves) -> list[str]:
    if not moves.gain:
        return []
    gained = (
        f"in the sampled layers alignment removes {100 * moves.gain['full']:.0f} % of the squared distance "
        f"({100 * moves.gain['permutation']:.0f} % by permutations alone)"
    )
    if moves.by_chance is not None:
        gained += f"; between unrelated weights it removes {100 * moves.by_chance:.0f} % by chance"
        if not is_more_than_chance(moves.gain["full"], moves.by_chance):
            gained += ", so align on data rather than on weights alone"
    stream = next((s["similarity"] for s in moves.spaces if s.get("similarity") is not None), None)
    if stream is None:
        return [gained]
    return [gained, f"up to a rotation, the similarity of their tables is {stream:.2f} (1: the same, 0: unrelated)"]


# --- is the difference of two models a LoRA's? ------------------------------------------------------------------------
SIDE = 256  # rows and columns of the piece that is looked at
LEAST = 8  # of a matrix that has directions worth counting
TENSORS = 4
FEW = 0.25  # of the directions of the piece: more is no adapter
ENOUGH = 0.7  # of the energy of the difference, in those few
NOISE = 3.0  # times the median: rounding the sum of a model and an adapter leaves many small directions


def low_rank_difference(
    first: Checkpoint, second: Checkpoint, differing: Mapping[str, float]
) -> LowRankDifference | None:
    """The rank that most of the difference has, in the matrices that differ most; None where it is no adapter's.

    A piece of the difference has as few directions as the whole."""
    names = sorted(differing, key=lambda name: (-differing[name], name))
    shapes = {
        name: first.tensors[name].shape for name in names if first.tensors[name].shape == second.tensors[name].shape
    }
    names = [name for name, shape in shapes.items() if len(shape) == 2 and min(shape) >= LEAST][:TENSORS]
    ranks: list[tuple[int, float]] = []
    for name in names:
        difference = _piece(first, name) - _piece(second, name)
        rank = directions(difference) if bool(difference.isfinite().all()) else None
        if rank is None:
            return None
        ranks.append(rank)
    if not ranks:
        return None
    return LowRankDifference(max(rank for rank, _ in ranks), min(energy for _, energy in ranks), names)


def directions(difference: Tensor) -> tuple[int, float] | None:
    """How many directions stand out of the noise and which share of the energy they have; None if that is no adapter.

    >>> left, right = torch.arange(64.0)[:, None], torch.ones(1, 64)
    >>> directions(left @ right)
    (1, 1.0)
    >>> directions(torch.eye(64)) is None
    True
    """
    sizes = torch.linalg.svdvals(difference.double())
    energy = float(sizes.square().sum())
    if not energy:
        return None
    floor = max(NOISE * float(sizes.median()), 1e-3 * float(sizes[0]))
    rank = int((sizes > floor).sum())
    share = float(sizes[:rank].square().sum()) / energy
    return (rank, round(share, 6)) if 0 < rank <= FEW * len(sizes) and share >= ENOUGH else None


def _piece(checkpoint: Checkpoint, name: str) -> Tensor:
    """(≤ SIDE, ≤ SIDE): rows and columns spread evenly."""
    rows, columns = checkpoint.tensors[name].shape
    wanted = torch.linspace(0, rows - 1, min(rows, SIDE)).long().tolist()
    picked = torch.linspace(0, columns - 1, min(columns, SIDE)).long()
    rows_read = [checkpoint.read_span(name, r * columns, (r + 1) * columns)[picked] for r in wanted]
    return torch.stack(rows_read).double()
