"""An adapter where a whole model is wanted."""

from __future__ import annotations

from isomerge.adapters.adapter import CONFIG, is_adapter
from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError


def require_model(checkpoint: Checkpoint) -> None:
    """Raise if this is an adapter, before anything is said about what it lacks as a model."""
    if holds_adapter(checkpoint):
        raise RequestError(
            f"Opening {checkpoint.name}: it is an adapter and not a model; {into_its_base(checkpoint)}, and name OUT."
        )


def holds_adapter(checkpoint: Checkpoint) -> bool:
    """Whether it was opened from the folder of an adapter."""
    return checkpoint.folder is not None and is_adapter(checkpoint.folder)


def has_adapter_beside(checkpoint: Checkpoint) -> bool:
    """Whether an adapter lies beside a model's own weights: transformers loads both, and isomerge the weights alone."""
    folder = checkpoint.folder
    return folder is not None and (folder / CONFIG).is_file() and not is_adapter(folder)


def into_its_base(checkpoint: Checkpoint) -> str:
    """How a model is made of an adapter, as part of a sentence."""
    return f"merge it into its base first (isomerge merge BASE+{checkpoint.name} -o OUT)"
