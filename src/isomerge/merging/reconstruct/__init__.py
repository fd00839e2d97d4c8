"""Merging by re-solving every linear map of the merged model towards the mean features of its (aligned) parents."""

from isomerge.merging.reconstruct.api import Batch, Batches, reconstruct
from isomerge.merging.reconstruct.result import Reconstructed

__all__ = ["Batch", "Batches", "Reconstructed", "reconstruct"]
