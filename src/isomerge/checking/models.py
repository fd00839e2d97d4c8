"""Opening what is to be checked: everything `merge` takes, a model with an adapter on top included."""

from __future__ import annotations

import os
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.plan.models import open_model as open_reference
from isomerge.merging.recipe import ModelReference


def open_model(model: Any) -> Checkpoint:
    """A checkpoint by its headers; a text may be `model@revision+adapter`."""
    if not isinstance(model, (str, os.PathLike)):
        return open_checkpoint(model)
    try:
        reference = ModelReference.parse(os.fspath(model))
    except ValueError as error:
        raise RequestError(f"Checking: {error}.") from error
    return open_reference(reference)
