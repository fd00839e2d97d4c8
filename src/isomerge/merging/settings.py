"""How a merge is run, whatever the recipe says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from isomerge.calibration import Statistics
from isomerge.merging.recipe_data import DataSets
from isomerge.merging.sources import InputHashes


@dataclass
class RunSettings:
    threads: int | None = None
    device: str = "cpu"
    max_memory: int | str | None = None
    progress: Callable[[int, int, str], None] | None = None
    data: DataSets = field(default_factory=DataSets)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """Statistics that were given as objects, by the name that stands for them in the recipe."""
    hashes: InputHashes = field(default_factory=InputHashes)
