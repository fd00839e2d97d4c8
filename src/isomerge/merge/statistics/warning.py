"""What to say when data are too few to decide."""

from __future__ import annotations


class StatisticsWarning(UserWarning):
    """A merge went on with less than it should have: few samples, or a ridge that had to decide."""


def too_little(tensor: str, count: int, width: int, ridge: float, alpha: float) -> str:
    """The warning for one linear map, or nothing."""
    if ridge == 0 and (count >= width or alpha < 1):
        return ""
    told = f"Merging '{tensor}' by regression: {count:,} samples for {width:,} inputs"
    if count < width:
        told += f", and at least {width:,} are needed to see every direction (ten times as many are better)"
    if ridge > 0:
        told += f". The Gram matrix is singular, so a ridge of {ridge:.3g} pulls what the data do not say to the mean"
    return told + "."
