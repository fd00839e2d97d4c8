"""Scramble a model by random symmetries: another checkpoint that computes the same."""

from __future__ import annotations

from isomerge.alignment.move import Move
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import random_transform


def scrambled(model: BoundModel, seed: int = 0, *, gauges: bool = True) -> Move:
    """The model moved by a random element of every space that can move, written in its own gauge."""
    transform = random_transform(model.architecture.spaces, seed, only=model.architecture.movable())
    canonical = Canonical(model, transform.elements, gauges=gauges)
    gauge = None if canonical.fragile_gains() else canonical
    return Move(model, transform, canonical, gauge)
