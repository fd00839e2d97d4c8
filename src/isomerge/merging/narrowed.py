"""A word where the result is written in less precision than some of its models have, and nobody asked for that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from isomerge.checkpoint.base import TensorInfo, main_dtype, name_some

if TYPE_CHECKING:
    from isomerge.merging.merged import Merged


def name_narrowed(merged: Merged) -> list[str]:
    """The models that lose by the dtype of another, as a note or none."""
    if merged.recipe.out_dtype or merged.recipe.dtype:
        return []
    written = _precision(job.info for job in merged.jobs)
    # Of the last recipe, what it merges: a base may give its config alone, and another document has a dtype of its own.
    plans = merged.tensor_plans.tensors.values()
    merging = {str(given.model) for plan in plans for given in [*plan.inputs, *([plan.base] if plan.base else [])]}
    stored = {name: _precision(merged.inputs[name].tensors.values()) for name in merged.models if name in merging}
    finer = [name for name, dtype in stored.items() if dtype.itemsize > written.itemsize]
    if not finer:
        return []
    most = max((stored[name] for name in finer), key=lambda dtype: dtype.itemsize)
    return [
        f"the result is stored in {_word(written)}, as the base or the first model is, and {name_some(finer)} in "
        f"{_word(most)}: --out-dtype {_word(most)} (in a recipe, out_dtype) keeps that precision"
    ]


def _precision(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Of the weights, as most of them have it."""
    return main_dtype(info for info in infos if info.dtype.is_floating_point) or torch.float32


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
