"""Is the difference of two models a LoRA's? A piece of the difference has then few directions, as the whole has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint

SIDE = 256  # rows and columns of the piece that is looked at
LEAST = 8  # of a matrix that has directions worth counting
TENSORS = 4
FEW = 0.25  # of the directions of the piece: more is no adapter
ENOUGH = 0.7  # of the energy of the difference, in those few
NOISE = 3.0  # times the median: rounding the sum of a model and an adapter leaves many small directions


def low_rank_difference(first: Checkpoint, second: Checkpoint, differing: Mapping[str, float]) -> dict[str, Any] | None:
    """The rank that most of the difference has, in the matrices that differ most; None where it is no adapter's."""
    names = sorted(differing, key=lambda name: (-differing[name], name))
    shapes = {
        name: first.tensors[name].shape for name in names if first.tensors[name].shape == second.tensors[name].shape
    }
    names = [name for name, shape in shapes.items() if len(shape) == 2 and min(shape) >= LEAST][:TENSORS]
    known: list[tuple[int, float]] = []
    for name in names:
        difference = _piece(first, name) - _piece(second, name)
        found = directions(difference) if bool(difference.isfinite().all()) else None
        if found is None:
            return None
        known.append(found)
    if not known:
        return None
    return {"rank": max(rank for rank, _ in known), "energy": min(energy for _, energy in known), "tensors": names}


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
