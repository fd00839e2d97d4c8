"""`merge_state_dicts`: the merge itself, without files, recipes or configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from isomerge.arguments import require_choice, require_types
from isomerge.checkpoint.base import TensorInfo, name_some
from isomerge.checkpoint.memory import as_tensors
from isomerge.errors import RequestError
from isomerge.merging.methods import METHODS
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import InMemory


def merge_state_dicts(
    models: Sequence[Mapping[str, Tensor | np.ndarray]],
    *,
    method: str = "linear",
    base: Mapping[str, Tensor | np.ndarray] | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """Merge state_dicts, of tensors or numpy arrays, by any method; integers come from the base, or the first model.

    >>> import torch
    >>> merge_state_dicts([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], weight=[1, 3])
    {'w': tensor([0.7500, 0.7500])}
    """
    single = isinstance(models, (str, Mapping)) or not isinstance(models, Iterable)
    if single or not all(isinstance(model, Mapping) for model in models):
        raise RequestError("Merging: models must be a list of state_dicts, as in merge_state_dicts([a, b]).")
    require_types(method=(method, str), base=(base, Mapping, None), seed=(seed, int))
    require_choice("method", method, METHODS)
    chosen = METHODS[method]
    if chosen.base == "required" and base is None:
        raise RequestError(f"Merging: {method} needs a base. Pass base=the state_dict of the common ancestor.")
    models = list(models)
    if not models:
        raise RequestError("Merging: there is no model. Pass a list of state_dicts.")
    chosen.require_count(len(models))
    if chosen.base == "ignored" and base is not None:
        raise RequestError(
            f"Merging: {method} has no use for a base. Leave it out, or put it among the models.", keys=("base",)
        )
    every = [as_tensors(state, "Merging") for state in [*models, *([base] if base is not None else [])]]
    _require_same_names(every)
    merged: dict[str, Tensor] = {}
    for name in every[-1]:
        tensors = [state[name].detach() for state in every]
        first = tensors[-1] if base is not None else tensors[0]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise RequestError(f"Merging: {name} has the shapes {sorted(shapes)}. Merge models of one architecture.")
        if len({tensor.is_floating_point() for tensor in tensors}) > 1:
            raise RequestError(
                f"Merging: {name} holds whole numbers in one model and fractions in another. Merge models stored alike."
            )
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        sources = [InMemory(tensor, f"tensor '{name}' of model {k}") for k, tensor in enumerate(tensors, start=1)]
        own, origin = (sources[:-1], sources[-1]) if base is not None else (sources, None)
        job = Job(name, TensorInfo.of(first), own, origin, chosen, options, seed=seed, device=str(first.device))
        merged[name] = job.rounded(job.tensor())[0].to(first.device)
    return merged


def _require_same_names(states: Sequence[Mapping[str, Tensor]]) -> None:
    for place, state in enumerate(states[1:], start=2):
        odd = sorted(states[0].keys() ^ state.keys())
        if odd:
            raise RequestError(
                f"Merging: model 1 and model {place} do not hold the same tensors ({name_some(odd)}). "
                "Merge models of one architecture."
            )
