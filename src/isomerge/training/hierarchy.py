"""HWA (Gu et al. 2023, arXiv 2304.11519): averages over models trained side by side, and over time.

    online, every H steps:  W̄ ← 1/P Σ_j θ_j,  θ_j ← W̄        offline:  the mean of the last I of the W̄

Helps as both of its parts do: the online mean lets the learning rate stay high, the offline mean takes its noise away.
"""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerCallback

from isomerge.training.averages import AverageCheckpoints
from isomerge.training.population import PopulationAverage


def hierarchical_average(
    folder: str | Path,
    member: str,
    members: int,
    *,
    every: int = 100,
    window: int = 10,
    wait: float = 600.0,
    out: str | Path | None = None,
    load: bool = False,
) -> list[TrainerCallback]:
    """The callbacks of one member: all take their mean every `every` steps; at the end the mean of the last `window`
    of those is written. `folder`, `member`, `members` and `wait` as in `PopulationAverage`, the rest as in
    `AverageCheckpoints`. Every member writes the same average.

    >>> from isomerge.training import hierarchical_average
    >>> [type(callback).__name__ for callback in hierarchical_average("shared", "a", 2)]
    ['PopulationAverage', 'AverageCheckpoints']
    """
    # In this order: the average over time is that of the means.
    return [
        PopulationAverage(folder, member, members, every=every, pull=1.0, wait=wait),
        AverageCheckpoints("lawa", every=every, window=window, out=out, load=load),
    ]
