"""Passes over data: activations, Gram matrices, Fisher information."""

from isomerge.calibration.api import calibrate
from isomerge.calibration.cross import CrossMoments, CrossStatistics, cross_statistics
from isomerge.calibration.sites import Site
from isomerge.calibration.statistics import Gram, Statistics, open_statistics
from isomerge.data.base import Batch, Batches

__all__ = [
    "Batch", "Batches", "CrossMoments", "CrossStatistics", "Gram", "Site", "Statistics", "calibrate",
    "cross_statistics", "open_statistics",
]  # fmt: skip
