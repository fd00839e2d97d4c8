"""What to say when data are too few to decide: once for all tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shortage:
    """A linear map whose data say too little."""

    tensor: str
    samples: int
    inputs: int
    """As many samples are needed to see every direction."""
    ridge: float
    """What was added to the diagonal of the Gram matrix; 0 where that was not needed."""


class StatisticsWarning(UserWarning):
    """A merge went on with less than it should have: few samples, or a ridge that had to decide."""

    def __init__(self, shortages: Sequence[Shortage]) -> None:
        self.shortages = tuple(shortages)
        super().__init__(_told(self.shortages))


def too_little(tensor: str, samples: int, inputs: int, ridge: float, alpha: float) -> StatisticsWarning | None:
    """The warning for one linear map, or nothing."""
    if ridge == 0 and (samples >= inputs or alpha < 1):
        return None
    return StatisticsWarning([Shortage(tensor, samples, inputs, ridge)])


@contextlib.contextmanager
def gathered(found: list[Shortage]) -> Iterator[None]:
    """Put what is warned about, by any thread, into a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StatisticsWarning)
        yield
    for warning in caught:
        if isinstance(warning.message, StatisticsWarning):
            found += warning.message.shortages
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def told_together() -> Iterator[None]:
    """One warning at the end instead of one for every tensor."""
    found: list[Shortage] = []
    with gathered(found):
        yield
    tell(found)


def tell(found: Sequence[Shortage]) -> None:
    if found:
        warnings.warn(StatisticsWarning(found), stacklevel=3)


def _told(shortages: Sequence[Shortage]) -> str:
    """How many samples there are and are needed, for which tensors, and what was done."""
    worst = max(shortages, key=lambda shortage: shortage.inputs - shortage.samples)
    few = [shortage.inputs for shortage in shortages if shortage.samples < shortage.inputs]
    ridges = [shortage.ridge for shortage in shortages if shortage.ridge > 0]
    told = [
        f"Merging by regression: the data say too little about {_maps(len(shortages))}, such as '{worst.tensor}' with "
        f"{worst.samples:,} samples for {worst.inputs:,} inputs."
    ]
    if few:
        told.append(
            f"There are fewer samples than inputs for {_maps(len(few))}; at least {max(few):,} are needed to see every "
            "direction, and ten times as many are better."
        )
    if ridges:
        told.append(
            f"The Gram matrix is singular for {_maps(len(ridges))}; there a ridge of {max(ridges):.3g} or less pulls "
            "what the data do not say to the mean."
        )
    return " ".join(told)


def _maps(number: int) -> str:
    return f"{number:,} linear maps" if number > 1 else "1 linear map"
