"""A model that is given two roles: the base, and one of the models beside it."""

from __future__ import annotations

from isomerge.merging.data_methods import ALL_METHODS
from isomerge.merging.recipe import Recipe


def base_among_models(document: Recipe) -> list[str]:
    """A note where it counts only as the base, as in mergekit: what is set for it among the models has no effect.

    Of two models (slerp) the base is one by its nature, and a method without a base takes it as one more.
    """
    method = ALL_METHODS[document.merge_method]
    listed = [entry.model for entry in document.models or ()]
    if document.base_model not in listed or method.base == "ignored" or method.most == 1:
        return []
    return [
        f"{document.base_model} is the base and also one of the models: {method.name} merges the others into it, and "
        "what is set for it as one of them, such as a weight, has no effect"
    ]
