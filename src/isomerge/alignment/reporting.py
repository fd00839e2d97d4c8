"""What an alignment says of itself: distances tensor by tensor, the verdict, what moved and why the rest stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.distance import squared
from isomerge.alignment.evidence import common_part
from isomerge.alignment.pairwise import Solution
from isomerge.checkpoint import CastReport
from isomerge.kinship import SIBLINGS, counted, relative_distance
from isomerge.symmetry.binding import BoundModel

Distance = tuple[float, float, float]  # ‖source − anchor‖², ‖moved − anchor‖², ‖anchor‖²
Provider = Callable[[str], Tensor]


def distances(
    source: BoundModel, anchor: BoundModel, moved: Provider, target: Provider, stays: Callable[[str], bool]
) -> dict[str, Distance]:
    """Per tensor both have; `target` is the anchor in the form the moved source is compared with.

    What `stays` is the same before and after, and is not made again.
    """
    found = {}
    for name in sorted(set(source.layouts) & set(anchor.layouts)):
        start, goal = common_part(*(model.raw(name, model.stored_precision) for model in (source, anchor)))
        before, size = squared(start, goal), squared(goal)
        after = before if stays(name) else squared(*common_part(moved(name), target(name)))
        found[name] = before, after, size
    return found


def relative(model: BoundModel, distances: Mapping[str, Distance], column: int) -> float | None:
    """The distance of `isomerge.kinship` before (column 0) or after (1); None where there is nothing to compare."""
    rows = _counted(model, distances)
    return relative_distance(sum(r[column] for r in rows), sum(r[2] for r in rows)) if rows else None


def _counted(
    model: BoundModel, distances: Mapping[str, Distance], names: Iterable[str] | None = None
) -> list[Distance]:
    """The rows of the tensors that count, of the whole model or of some names."""
    if names is None:
        return [distances[name] for name in counted({name: len(model.layouts[name].shape) for name in distances})]
    known = [name for name in names if name in distances]
    return [distances[name] for name in [n for n in known if len(model.layouts[n].shape) > 1] or known]


def are_siblings(solution: Solution) -> bool:
    """Nothing needs to move, though it could."""
    return not solution.transform.elements and bool(solution.source.architecture.movable())


def verdict(solution: Solution) -> str:
    """One line."""
    moved, spaces = solution.transform.elements, solution.source.architecture.spaces
    if are_siblings(solution):
        return f"{SIBLINGS}: nothing needs to move; the output is the source, bit for bit"
    if not moved:
        return "unmoved: no space of this model may move here (see the notes); the output is the source, bit for bit"
    return f"aligned: {len(moved)} of {len(spaces)} spaces moved"


def spaces(solution: Solution, distances: Mapping[str, Distance]) -> list[dict[str, Any]]:
    """A row per space: how much of it moved, what that gained, or why it stays."""
    rows = []
    model = solution.source
    for space, group in sorted(model.architecture.spaces.items()):
        touched = _counted(model, distances, model.touching(space))
        before, after = (sum(t[k] for t in touched) for k in (0, 1))
        element = solution.transform.elements.get(space)
        order = None if element is None else group.order(element)
        moved: bool | float = element is not None
        if order is not None:
            moved = float((order.cpu() != torch.arange(group.size)).double().mean())
        rows.append({
            "name": space, "group": group.name, "moved": moved,
            "gain": None if solution.anchor is None else (before - after) / before if before > 0 else 0.0,
            "reason": None if element is not None else solution.stays.get(space, "held at the identity"),
        })  # fmt: skip
    return rows


def warnings(untied: bool, fragile: Sequence[str], lost: Mapping[str, CastReport]) -> Iterator[str]:
    """What to know before averaging the output, and what the written dtype could not hold."""
    if untied:
        yield (
            "input and output table were tied and are now separate (tie_word_embeddings: false), since the stream was "
            "rotated; write the anchor the same way with --anchor-out to average the two"
        )
    if fragile:
        yield (
            f"{len(fragile)} norm(s) of the anchor have gains near zero ({fragile[0]} …), so OUT is in canonical form: "
            "average it with the folder of --anchor-out, not with the anchor itself"
        )
    for file, report in lost.items():
        if not report.lossless:
            yield (
                f"{file}: {report.overflow} values overflowed and {report.underflow} became zero in the written dtype; "
                "--out-dtype float32 keeps them"
            )
