"""Models of a recipe, opened by their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.errors import RequestError
from isomerge.merging.recipe import ModelReference, Recipe


def open_model(reference: ModelReference, model: Any = None) -> Checkpoint:
    """A model by its header, with its adapter on top."""
    named = model is None or isinstance(model, (str, Path, ModelReference))
    if named and Path(reference.path).is_dir():
        from isomerge.adapters.adapter import is_adapter

        if is_adapter(reference.path):
            raise RequestError(
                f"Opening {reference.path}: it is an adapter and not a model. Write base+adapter to merge the model it "
                "makes, or name nothing but adapters (isomerge merge adapter-a adapter-b -o OUT) to merge these."
            )
    checkpoint = open_checkpoint(reference.path, revision=reference.revision) if named else open_checkpoint(model)
    if reference.adapter is None or not named:
        return checkpoint
    from isomerge.adapters import apply_adapter

    return apply_adapter(checkpoint, reference.adapter, revision=reference.adapter_revision, name=str(reference))


def open_models(
    documents: Sequence[Recipe], given: Mapping[ModelReference, Any] | None = None
) -> dict[ModelReference, Checkpoint]:
    """Every model that the documents name and do not make themselves, by headers only; all that fail, at once."""
    made = {document.name for document in documents if document.name}
    wanted = dict.fromkeys(
        reference for document in documents for reference in document.referenced_models() if str(reference) not in made
    )
    opened, problems = {}, []
    for reference in wanted:
        try:
            opened[reference] = open_model(reference, (given or {}).get(reference))
        except Exception as error:  # told together with the others below
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        told = " ".join(f"({place}) {error}" for place, error in enumerate(problems, start=1))
        raise RequestError(f"Opening the models of the recipe, {len(problems)} problems: {told}")
    return opened
