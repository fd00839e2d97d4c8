"""Several experts as one: which are alike, whose units belong together, and their weighted mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform
from torch import Tensor

from isomerge.merging.experts.layers import Maps

Activation = Callable[[Tensor], Tensor]


def output(maps: Maps, inputs: Tensor, activation: Activation) -> Tensor:
    """down (act(gate x) · up x), for rows of inputs."""
    return (activation(inputs @ maps["gate"].T) * (inputs @ maps["up"].T)) @ maps["down"].T


def apart_on_data(experts: Sequence[Maps], inputs: Tensor, activation: Activation) -> Tensor:
    """(experts, experts): the mean square of the difference of two experts' outputs on the same inputs, relative to
    their own mean squares."""
    outputs = torch.stack([output(maps, inputs, activation).flatten() for maps in experts])
    squares = outputs.square().sum(1)
    gram = outputs @ outputs.T
    far = (squares[:, None] + squares[None] - 2 * gram).clamp_min(0)
    return far / (squares[:, None] + squares[None]).clamp_min(1e-300)


def apart_by_weights(experts: Sequence[Maps]) -> Tensor:
    """(experts, experts): the same of the weights, with the units of one in the order that fits the other best."""
    count = len(experts)
    far = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i):
            own, other = _flat(experts[i]), _flat(in_order_of(experts[j], experts[i]))
            difference = (own - other).square().sum() / (own.square().sum() + other.square().sum()).clamp_min(1e-300)
            far[i, j] = far[j, i] = difference
    return far


def groups(distances: Tensor, keep: int) -> list[list[int]]:
    """Exactly `keep` groups by average linkage (HC-SMoE, Chen et al. 2024), ordered by their first members.

    >>> groups(torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.8], [0.9, 0.8, 0.0]]), 2)
    [[0, 1], [2]]
    """
    if keep >= len(distances):
        return [[one] for one in range(len(distances))]
    condensed = squareform(distances.numpy(), checks=False)
    labels = fcluster(linkage(condensed, "average"), keep, criterion="maxclust")
    found = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    while len(found) < keep:  # equal distances: nothing tells which to join, so the largest group gives one up
        largest = max(found, key=len)
        found.append([largest.pop()])
    return sorted(found)


def in_order_of(maps: Maps, like: Maps) -> Maps:
    """The same expert with its units in the order, and with the signs, in which they fit those of `like` best: an
    expert computes the same in any order, and with the signs of a unit's up and down turned together."""
    gate = like["gate"] @ maps["gate"].T
    rest = like["up"] @ maps["up"].T + like["down"].T @ maps["down"]
    score = gate + rest.abs()
    rows, order = linear_sum_assignment(score.numpy(), maximize=True)
    sign = torch.where(rest[torch.from_numpy(rows), torch.from_numpy(order)] < 0, -1.0, 1.0).double()
    found = torch.from_numpy(order)
    return {
        "gate": maps["gate"][found], "up": maps["up"][found] * sign[:, None], "down": maps["down"][:, found] * sign,
    }  # fmt: skip


def weighted_mean(experts: Sequence[Maps], weights: Sequence[float]) -> Maps:
    """Their mean, the units of all in the order of the one that counts most."""
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [1 / len(experts)] * len(experts)
    first = max(range(len(experts)), key=lambda k: shares[k])
    fitted = [maps if k == first else in_order_of(maps, experts[first]) for k, maps in enumerate(experts)]
    return {part: sum(share * maps[part] for share, maps in zip(shares, fitted, strict=True)) for part in experts[0]}  # type: ignore[misc]


def _flat(maps: Maps) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in maps.values()])
