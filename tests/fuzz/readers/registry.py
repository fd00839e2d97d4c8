"""What a reader is, and the list of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuzz import mutators as m

Seed = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    seeds: Callable[[], list[Seed]]
    """Good folders by file name."""
    damage: Mapping[str, m.Mutator]
    read: Callable[[Path], Any]
    """May write beside the folder it is given, which no other process does."""
    safetensors: str | None = None
    """A file that the safetensors library must accept whenever we do."""

    def make(self, seeds: list[Seed], rng: random.Random) -> Seed:
        """A damaged folder."""
        whole = rng.choice([seed for seed in seeds if seed.keys() & self.damage.keys()])
        target = rng.choice([name for name in self.damage if name in whole])
        return {**whole, target: self.damage[target](whole[target], rng)}


READERS: dict[str, Reader] = {}


def reader(name: str, seeds: Callable[[], list[Seed]], damage: Mapping[str, m.Mutator], **more: Any) -> Any:
    def register(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
        READERS[name] = Reader(seeds, damage, read, **more)
        return read

    return register


def content_of(folder: Path) -> Seed:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stored(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save(dict(tensors), dict(metadata) if metadata else None)


SMALL = {
    "a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "steps": torch.tensor(3), "none": torch.zeros(0, 5), "flags": torch.tensor([True, False]),
}  # fmt: skip
