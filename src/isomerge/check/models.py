"""Opening what is to be checked: everything `merge` takes, a model with an adapter on top included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merge.recipe import ModelReference


def open_model(model: Any) -> Checkpoint:
    """A checkpoint by its headers; a text may be `model@revision+adapter`."""
    if not isinstance(model, (str, os.PathLike)):
        return open_checkpoint(model)
    try:
        reference = ModelReference.parse(os.fspath(model))
    except ValueError as error:
        raise RequestError(f"Checking: {error}.") from error
    from isomerge.adapters.adapter import is_adapter

    if Path(reference.path).is_dir() and is_adapter(reference.path):
        raise RequestError(
            f"Checking {reference.path}: it is an adapter and not a model. Write base+adapter to check the model it "
            "makes; adapters are merged without a check (isomerge merge adapter-a adapter-b -o OUT)."
        )
    checkpoint = open_checkpoint(reference.path, revision=reference.revision)
    if reference.adapter is None:
        return checkpoint
    from isomerge.adapters import apply_adapter

    return apply_adapter(checkpoint, reference.adapter, revision=reference.adapter_revision, name=str(reference))
