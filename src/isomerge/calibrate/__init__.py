"""Passes over data: activations, Gram matrices, Fisher information."""

from isomerge.calibrate.api import WHAT, calibrate
from isomerge.calibrate.batches import Batch, Batches
from isomerge.calibrate.cross import CrossMoments, CrossStatistics, cross_statistics
from isomerge.calibrate.sites import Site
from isomerge.calibrate.statistics import Gram, Statistics, open_statistics

__all__ = [
    "WHAT", "Batch", "Batches", "CrossMoments", "CrossStatistics", "Gram", "Site", "Statistics", "calibrate",
    "cross_statistics", "open_statistics",
]  # fmt: skip
