"""The residual stream of two models, seen by its outer tables: in one basis, in another order, or rotated?

And what an alignment gains where there is nothing to find. The best of many choices gains something even between
unrelated weights, and a rotation of a stream fits the noise of a fine-tuning too. So the same solver runs once more, on
a model that shares with the other what the two share in place, and whose rest is shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.evidence import common_part, cross
from isomerge.alignment.report import share_moved
from isomerge.alignment.solvers.by_group import solve
from isomerge.kinship import inner, relative_distance, squared
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.groups import Group
from isomerge.symmetry.patterns import Layout, Segment, bind
from isomerge.symmetry.transform import Transform

ROWS = 1024  # of a table
TOKENS = 512  # for the similarity up to a rotation
WIDEST_ORDER, WIDEST_ROTATION = 2048, 1024  # streams up to this width are solved, wider ones looked at
CLEAR = 0.25  # of the squared distance of the tables: more, and more than chance, moves the stream before its units


def judge_stream(
    source: BoundModel, anchor: BoundModel, layouts: Mapping[str, Layout], scopes: Mapping[str, Mapping[str, Group]],
    dtype: torch.dtype,
) -> tuple[dict[str, Any] | None, Transform]:  # fmt: skip
    """Distance, moved units, gain per level and by chance, similarity up to a rotation; and a move that is clear."""
    spaces = source.architecture.spaces
    tables = [n for n, lay in layouts.items() if lay.spaces() == {RESIDUAL} and len(lay.shape) > 1]
    stays = Transform(spaces)
    if not tables:
        return None, stays
    sums, by_chance = _TableSums(), _TableSums()
    random = torch.Generator().manual_seed(0)
    similarity = None
    for name in tables:
        a, b, layout = _rows(source, anchor, name, layouts[name], dtype)
        axis, segment = next((k, s) for k, ax in enumerate(layout.axes) for s in ax if s.atoms[0].space == RESIDUAL)
        width = segment.sizes[0]
        sums.add(a, b, segment, axis)
        if width <= WIDEST_ORDER:  # wider ones are not solved
            by_chance.add(shuffled_rest(a, b, random), b, segment, axis)
        if similarity is None:
            similarity = _similarity(
                segment.take(a, axis).reshape(width, -1).T, segment.take(b, axis).reshape(width, -1).T
            )
    row: dict[str, Any] = {"distance": sums.distance, "moved": 0.0, "gain": 0.0, "similarity": similarity,
                           "levels": {}}  # fmt: skip
    if not sums.apart:
        return row, stays
    best = stays
    for level in ("permutation", "full"):
        group = scopes[level][RESIDUAL]
        element, gain = _solve(group, sums)
        if element is None:
            continue
        row["levels"][level] = gain
        order = group.order(element)
        if level == "permutation":
            row["moved"] = 0.0 if order is None else share_moved(order)
        lucky = _solve(group, by_chance)[1]
        # Turning every tensor by a rotation that fits noise would take longer than all the rest.
        if gain > max(CLEAR, row["gain"]) and is_more_than_chance(gain, lucky):
            best = Transform({**spaces, RESIDUAL: group}, {RESIDUAL: element})
        row["gain"] = max(row["gain"], gain)
        row["by_chance"] = max(row.get("by_chance", 0.0), lucky)
    if not row["levels"]:
        row["moved"] = share_moved(sums.products.argmax(0))
    return row, best


@dataclass
class _TableSums:
    """Sums over the tables of two models."""

    products: Tensor = field(default_factory=lambda: torch.zeros(()))  # (width, width), once there is a table
    apart: float = 0.0
    size: float = 0.0  # ‖a‖²: distances are from the first model
    here: float = 0.0

    def add(self, a: Tensor, b: Tensor, segment: Segment, axis: int) -> None:
        self.products = self.products + cross(segment, a, b, axis)[0]
        self.apart += squared(a - b)
        self.size += squared(a)
        self.here += inner(a, b)

    @property
    def distance(self) -> float | None:
        return relative_distance(self.apart, self.size)


def _solve(group: Group, sums: _TableSums) -> tuple[Tensor | None, float]:
    """The best move, and the share of the squared distance that it takes away; None where it is not looked for."""
    widest = WIDEST_ORDER if group.reorders else WIDEST_ROTATION
    if not group.movable or len(sums.products) > widest or not sums.apart:
        return None, 0.0
    element, earned = solve(group, sums.products[None])
    return element[0], 2 * (float(earned[0]) - sums.here) / sums.apart


def _rows(
    source: BoundModel, anchor: BoundModel, name: str, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Layout]:
    """Both tables, cut to what they share and to some rows spread over it."""
    files = [model.files.get(name) for model in (source, anchor)]
    shapes = [model.layouts[name].shape for model in (source, anchor)]
    rows = min(shape[0] for shape in shapes)
    long = len(layout.shape) == 2 and rows > ROWS and layout.axes[0][0].atoms[0].free
    if not long or any(f is None or len(f) != 1 for f in files):
        a, b = common_part(source.raw(name, dtype), anchor.raw(name, dtype))
        return a, b, bind(layout.pattern, a.shape, source.architecture.spaces, name)
    width = layout.shape[1]
    starts = torch.linspace(0, rows - 64, ROWS // 64).long().tolist()
    tables = []
    for model, file in zip((source, anchor), files, strict=True):
        assert file is not None
        parts = [model.checkpoint.read_span(file[0], s * width, (s + 64) * width).to(dtype) for s in starts]
        tables.append(torch.cat(parts).reshape(-1, width))
    return tables[0], tables[1], bind(layout.pattern, tables[0].shape, source.architecture.spaces, name)


def _similarity(a: Tensor, b: Tensor) -> float | None:
    """How alike two tables are up to a rotation (linear CKA without the bias of few rows): 1 the same, 0 unrelated."""
    rows = torch.linspace(0, len(a) - 1, min(TOKENS, len(a))).long()
    if len(rows) < 8:
        return None
    x, y = (_centred(t[rows].double()) for t in (a, b))
    size = math.sqrt(max(0.0, float((x * x).sum())) * max(0.0, float((y * y).sum())))
    return float((x * y).sum()) / size if size else None


def _centred(x: Tensor) -> Tensor:
    """The Gram matrix of rows, centred so that unrelated ones have product 0 on average (Székely & Rizzo, 2014)."""
    n = len(x)
    gram = (x @ x.T).fill_diagonal_(0.0)
    sums, total = gram.sum(0), gram.sum()
    gram = gram - sums[:, None] / (n - 2) - sums[None, :] / (n - 2) + total / ((n - 1) * (n - 2))
    return gram.fill_diagonal_(0.0)


# --- chance -----------------------------------------------------------------------------------------------------------
def shuffled_rest(a: Tensor, b: Tensor, random: torch.Generator) -> Tensor:
    """c·b + the rest of `a` with every axis in a random order, where c·b is the part of `a` along `b`.

    Of siblings c is near 1 and their difference is shuffled; of strangers c is near 0 and everything is. c is never
    below 0: −b in its place is a sign that can be turned, and so something to find.
    """
    size = squared(b)
    share = max(0.0, inner(a, b) / size) if size else 0.0
    rest = a - share * b
    for axis, length in enumerate(rest.shape):
        rest = rest.index_select(axis, torch.randperm(length, generator=random))
    return share * b + rest


def is_more_than_chance(gain: float, chance: float) -> bool:
    """Half as much again as chance, or half of what chance leaves, whichever is less: a gain is never more than 1.

    >>> is_more_than_chance(0.26, 0.25), is_more_than_chance(0.5, 0.25), is_more_than_chance(0.99, 0.8)
    (False, True, True)
    """
    return gain >= min(1.5 * chance, (1 + chance) / 2)
