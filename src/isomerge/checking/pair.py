"""One pair of models: identical, siblings or strangers, with the numbers and the reasons in words."""

from __future__ import annotations

import math
from typing import Any

from isomerge.checking.chance import more_than_chance
from isomerge.checking.compare import OUTSIDE, Comparison
from isomerge.checking.lowrank import low_rank_difference
from isomerge.checking.moving import Moving, judge_moving
from isomerge.checking.samples import number_of
from isomerge.checkpoint import Checkpoint, is_harmless_buffer
from isomerge.checkpoint.base import name_some

VERDICTS = ("identical", "siblings", "strangers")  # from the best to the worst
NEAR = 0.5  # relative distance below which the layer that changed most tells whether any unit changed its place
LARGE = 200_000_000  # parameters of a model of which one layer is enough
STRANGERS = 0.9  # relative distance from which two models share no more than their architecture


def judge_pair(first: Checkpoint, second: Checkpoint, found: Comparison, *, brief: bool = False) -> dict[str, Any]:
    """The record of a pair. `brief` assigns no units where every layer is near: none has changed its place then."""
    settled = found.same or (brief and all(sums.distance < NEAR for sums in found.layers.values()))
    moving = Moving() if settled else judge_moving(first, second, _layers(found), wide=found.extreme)
    if found.same and _shapes(first) == _shapes(second):
        verdict = "identical"
    else:
        near = found.kinship.distance < STRANGERS or found.shares_tensors
        verdict = "siblings" if near and not moving.wanting else "strangers"
    low = low_rank_difference(first, second, found.differing) if verdict == "siblings" else None
    helps = verdict == "strangers"
    return {
        "models": [first.name, second.name],
        "verdict": verdict,
        "reasons": _reasons(verdict, found, moving, low),
        **found.all.record(),
        "cosine": found.cosine,
        "change_cosine": found.changes.cosine,
        "change_conflict": found.changes.changed_conflict,
        "identical_tensors": len(found.identical),
        "low_rank": low,
        "alignment_helps": helps,
        "alignment": {
            "helps": helps,
            "level": moving.level if helps else None,
            "gain": moving.gain,
            "by_chance": moving.by_chance,
        },
        "layers": found.layer_rows(),
        "spaces": moving.spaces,
    }


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in checkpoint.tensors.items() if not is_harmless_buffer(name)}


def _layers(found: Comparison) -> set[int]:
    """The layers whose units are assigned: the middle one and, of small models, the last; of near models the worst."""
    by_layer = {name: sums.distance for name, sums in found.layers.items() if name != OUTSIDE}
    if not by_layer:
        return set()
    if found.kinship.distance < NEAR:
        return {number_of(max(by_layer, key=lambda name: by_layer[name]))}
    numbers = sorted({number_of(name) for name in by_layer})
    return {numbers[len(numbers) // 2], *([numbers[-1]] if found.all.count < LARGE else [])}


def _reasons(verdict: str, found: Comparison, moving: Moving, low: dict[str, Any] | None) -> list[str]:
    if verdict == "identical":
        return ["every sampled value is the same, bit for bit"]
    near = f"relative distance {found.all.distance:.3g}, cosine {found.cosine or 0.0:.3g}"
    if verdict == "siblings":
        kept = "; every sampled unit is already in its best place" if moving.spaces else ""
        told = [f"{near}{kept}"]
    elif moving.spaces:
        told = [f"{near}; {len(moving.wanting)} of {len(moving.spaces)} sampled spaces want to move", *_gain(moving)]
    else:
        told = [near]
    if found.identical and verdict == "siblings":
        told.append(f"{len(found.identical)} tensors are the same in both, as far as they were sampled")
    if low is not None:
        told.append(
            f"their difference is that of an adapter: {low['rank']} directions hold {100 * low['energy']:.0f} % of it "
            f"in {name_some(low['tensors'], 2)}"
        )
    if found.odd_sizes:
        told.append(_odd(found.odd_sizes))
    return [*told, *dict.fromkeys(moving.notes)]


def _odd(sizes: list[tuple[str, float]]) -> str:
    """How many tensors differ much in size, and the one that differs most."""
    name, ratio = max(sizes, key=lambda one: max(one[1], 1 / one[1]) if one[1] else math.inf)
    most = f"is {ratio:.2g} times as large" if 0 < ratio < math.inf else "is all zero in one of the two"
    return f"{len(sizes)} tensors differ much in size; {name} {most}"


def _gain(moving: Moving) -> list[str]:
    if not moving.gain:
        return []
    told = (
        f"in the sampled layers alignment takes away {100 * moving.gain['full']:.0f} % of the squared distance "
        f"({100 * moving.gain['permutation']:.0f} % by permutations alone)"
    )
    if moving.by_chance is not None:
        told += f"; between unrelated weights it takes away {100 * moving.by_chance:.0f} % by chance"
        if not more_than_chance(moving.gain["full"], moving.by_chance):
            told += ", so that data should decide and not the weights alone"
    stream = next((s["similarity"] for s in moving.spaces if s.get("similarity") is not None), None)
    if stream is None:
        return [told]
    return [told, f"up to a rotation their tables are alike to {stream:.2f} (1: the same, 0: unrelated)"]
