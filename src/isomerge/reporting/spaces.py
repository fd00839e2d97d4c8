"""What moved in every space of a model: how much of it, how far, and which units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isomerge.alignment import reporting
from isomerge.alignment.pairwise import Solution
from isomerge.reporting.units import moved_units


def space_moves(solution: Solution) -> list[dict[str, Any]]:
    """A row per space: group, how much of it moved, how far its units travelled and where to, or why it stays."""
    rows = []
    for row in reporting.spaces(solution, {}):
        element = solution.transform.elements.get(row["name"])
        order = None if element is None else solution.transform.spaces[row["name"]].order(element)
        rows.append({
            **{key: row[key] for key in ("name", "group", "moved", "reason")},
            "displacement": None if order is None else displacement(order),
            "units": moved_units(solution.transform, row["name"]),
        })  # fmt: skip
    return rows


def displacement(order: Tensor) -> float:
    """How far a unit travels on average, as a share of the farthest it could: about a third for a random order.

    >>> displacement(torch.tensor([0, 1, 2])), displacement(torch.tensor([2, 1, 0]))
    (0.0, 0.6666666666666666)
    """
    size = order.shape[-1]  # orders within each of several parents come as rows
    if size < 2:
        return 0.0
    travelled = (order.cpu() - torch.arange(size)).abs().double().mean()
    return float(travelled) / (size - 1)
