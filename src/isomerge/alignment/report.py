"""What an alignment reports: distances tensor by tensor, what moved and why the rest stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.evidence import common_part, squared_distance
from isomerge.checkpoint import CastReport
from isomerge.kinship import counted, relative_distance
from isomerge.results import Result
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.transform import Transform

Distance = tuple[float, float, float]  # ‖source − anchor‖², ‖moved − anchor‖², ‖anchor‖²
Provider = Callable[[str], Tensor]


@dataclass
class BeforeAndAfter(Result):
    """Relative distances; None where there was nothing to compare with."""

    before: float | None
    after: float | None


@dataclass
class SpaceReport(Result):
    """One space: how much of it moved (the share of its units where they change places), the gain, or why it stays."""

    name: str
    group: str
    moved: bool | float
    gain: float | None
    reason: str | None


@dataclass
class AlignmentReport(Result):
    """What `Alignment.report` returns."""

    source: str
    anchor: str | None
    family: str
    level: str
    verdict: str
    distance: BeforeAndAfter
    spaces: list[SpaceReport]
    objective: list[float]
    max_output_difference: float | None
    max_output_difference_reason: str | None
    gauge: str
    untied: bool
    notes: list[str]
    seconds: float
    learned: dict[str, Any] | None = None


@dataclass
class FamilyReport(Result):
    """What `AlignedFamily.report` returns: one report per model, and the means over them."""

    anchor: str
    many: str
    verdict: str
    distance: BeforeAndAfter
    spaces: list[SpaceReport]
    models: list[AlignmentReport]
    max_output_difference: float | None
    max_output_difference_reason: str | None
    notes: list[str]
    seconds: float


def distances_between(
    source: BoundModel, anchor: BoundModel, moved: Provider, target: Provider, stays: Callable[[str], bool]
) -> dict[str, Distance]:
    """Per tensor both have; `target` is the anchor in the form the moved source is compared with.

    What `stays` is the same before and after, and is not made again.
    """
    distances = {}
    for name in sorted(set(source.layouts) & set(anchor.layouts)):
        start, goal = common_part(*(model.raw(name, model.stored_precision) for model in (source, anchor)))
        before, size = squared_distance(start, goal), squared_distance(goal)
        after = before if stays(name) else squared_distance(*common_part(moved(name), target(name)))
        distances[name] = before, after, size
    return distances


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


def space_reports(
    model: BoundModel, transform: Transform, stays: Mapping[str, str], distances: Mapping[str, Distance] | None
) -> list[SpaceReport]:
    """A row per space; without `distances` gains are unknown."""
    rows = []
    for space, group in sorted(model.architecture.spaces.items()):
        gain = None
        if distances is not None:
            touched = _counted(model, distances, model.touching(space))
            before, after = (sum(t[k] for t in touched) for k in (0, 1))
            gain = (before - after) / before if before > 0 else 0.0
        element = transform.elements.get(space)
        order = None if element is None else group.order(element)
        moved = element is not None if order is None else share_moved(order)
        reason = None if element is not None else stays.get(space, "held at the identity")
        rows.append(SpaceReport(space, group.name, moved, gain, reason))
    return rows


def share_moved(order: Tensor) -> float:
    """The share of units that change places; orders within each of several parents come as rows.

    >>> share_moved(torch.tensor([0, 2, 1, 3]))
    0.5
    """
    return float((order.cpu() != torch.arange(order.shape[-1])).double().mean())


def warnings(untied: bool, fragile: Sequence[str], lost: Mapping[str, CastReport]) -> Iterator[str]:
    """What to know before averaging the output, and what the written dtype could not hold."""
    if untied:
        yield (
            "input and output table were tied and are now separate (tie_word_embeddings: false), since the stream was "
            "rotated; write the anchor the same way with `anchor_out` to average the two"
        )
    if fragile:
        yield (
            f"{len(fragile)} norm(s) of the anchor have gains near zero ({fragile[0]} …), so the output is in "
            "canonical form: average it with what `anchor_out` writes, not with the anchor itself"
        )
    for file, report in lost.items():
        if not report.lossless:
            yield (
                f"{file}: {report.overflow} values overflowed and {report.underflow} became zero in the written dtype; "
                "`out_dtype` float32 keeps them"
            )
