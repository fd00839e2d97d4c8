"""Open checkpoints by their headers, read one tensor at a time, write them as a stream."""

from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.checkpoint.checks import is_buffer, is_harmless_buffer, require_finite, require_floating
from isomerge.checkpoint.dtypes import CastReport, cast, parse_dtype, parse_size
from isomerge.checkpoint.memory import load_into_module
from isomerge.checkpoint.open import CheckpointSource, open_checkpoint
from isomerge.checkpoint.staging import refuse_overwrite
from isomerge.checkpoint.writer import Written, write_checkpoint

__all__ = [
    "CastReport",
    "Checkpoint",
    "CheckpointSource",
    "TensorInfo",
    "Written",
    "cast",
    "is_buffer",
    "is_harmless_buffer",
    "load_into_module",
    "open_checkpoint",
    "parse_dtype",
    "parse_size",
    "refuse_overwrite",
    "require_finite",
    "require_floating",
    "write_checkpoint",
]
