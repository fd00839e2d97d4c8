"""Rules that keep a few hostile or broken clients from deciding the result. Each works on the clients' updates.

A guard takes the updates Δ_i = w_i − w and the clients' shares, and gives back updates and shares to go on with, and
what it did in sentences. It is one pure function; `GUARDS` is their table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.federated.clients import squared_norm

Update = Mapping[str, Tensor]


@dataclass(frozen=True)
class Guarded:
    """What is left after a guard: updates with their shares, of the clients whose numbers are in `kept`."""

    updates: list[Update]
    shares: list[float]
    kept: list[int]
    notes: list[str]


def clip(updates: Sequence[Update], shares: Sequence[float], names: Sequence[str], hostile: int) -> Guarded:
    """Norm clipping (Sun et al. 2019): Δ_i ← Δ_i · min(1, m / ‖Δ_i‖), m the median of all norms.

    A client that is far away counts less. One whose update points the other way still counts as much as any.
    """
    norms = [math.sqrt(squared_norm(update)) for update in updates]
    bound = sorted(norms)[(len(norms) - 1) // 2]
    scales = [min(1.0, bound / norm) if norm > 0 else 1.0 for norm in norms]
    clipped = [
        update if scale == 1.0 else {name: scale * tensor for name, tensor in update.items()}
        for update, scale in zip(updates, scales, strict=True)
    ]
    notes = [
        f"client {name} is clipped to {scale:.2g} of its update, which is {norm / bound:.3g} times the median"
        for name, scale, norm in zip(names, scales, norms, strict=True)
        if scale < 0.5  # half of all clients are above the median, and little above it is no news
    ]
    return Guarded(list(clipped), list(shares), list(range(len(updates))), notes)


def median(updates: Sequence[Update], shares: Sequence[float], names: Sequence[str], hostile: int) -> Guarded:
    """Coordinate-wise median (Yin et al. 2018): Δ = median_i Δ_i, every client counting the same.

    Right as long as fewer than half of the clients are hostile. Clients with unlike data pay for it: what only few of
    them learned is lost.
    """
    middle = {name: _median(torch.stack([update[name] for update in updates])) for name in updates[0]}
    return Guarded([middle], [1.0], list(range(len(updates))), [])


def _median(stacked: Tensor) -> Tensor:
    """Of an even number, the mean of the middle two; torch's own takes the lower."""
    ordered = stacked.sort(0).values
    low, high = (len(stacked) - 1) // 2, len(stacked) // 2
    return (ordered[low] + ordered[high]) / 2


def krum(updates: Sequence[Update], shares: Sequence[float], names: Sequence[str], hostile: int) -> Guarded:
    """Multi-Krum (Blanchard et al. 2017): the n − f clients nearest to their neighbours, averaged by examples.

    The score of a client is Σ ‖Δ_i − Δ_j‖² over its n − f − 2 nearest others, f the number of hostile clients.
    """
    count = len(updates)
    if count < 2 * hostile + 3:
        raise RequestError(
            f"Aggregating: krum needs {2 * hostile + 3} clients to be safe from {hostile}, and there are {count}. "
            "Ask more clients, expect fewer hostile ones, or use the median.",
            keys=("hostile",),
        )
    distances = [
        [
            squared_norm({name: one[name] - other[name] for name in one}) if place < number else 0.0
            for place, other in enumerate(updates)
        ]
        for number, one in enumerate(updates)
    ]
    both = [[distances[max(i, j)][min(i, j)] for j in range(count)] for i in range(count)]
    nearest = count - hostile - 2
    scores = [math.fsum(sorted(row[:i] + row[i + 1 :])[:nearest]) for i, row in enumerate(both)]
    kept = sorted(sorted(range(count), key=lambda number: (scores[number], number))[: count - hostile])
    total = math.fsum(shares[number] for number in kept)
    notes = [f"client {names[number]} is left out: it is the farthest from the others" for number in range(count)
             if number not in kept]  # fmt: skip
    return Guarded([updates[n] for n in kept], [shares[n] / total for n in kept], kept, notes)


GUARDS: dict[str, Callable[[Sequence[Update], Sequence[float], Sequence[str], int], Guarded]] = {
    "clip": clip,
    "median": median,
    "krum": krum,
}
