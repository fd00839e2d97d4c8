"""Real data as batches a stock model takes: images in folders and archives, texts, tables, tagged sentences."""

from isomerge.data.base import Batch, Batches, Data
from isomerge.data.open import open_data
from isomerge.data.options import DataOptions
from isomerge.data.task_heads import task_of

__all__ = ["Batch", "Batches", "Data", "DataOptions", "open_data", "task_of"]
