"""What the specification says about the parameters of a stock module: who writes to the stream, what to refit."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.merging.layerwise.parent_views import is_gain
from isomerge.symmetry.architecture import RESIDUAL, Norm
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.patterns import Layout


@dataclass(frozen=True)
class ParameterRoles:
    """By names in memory."""

    weights: list[str]
    norms: list[str]
    writers: frozenset[str] | None
    """None where nothing is known of the stream: then whatever is added to something may be a writer."""
    stored: dict[str, str]
    """The name on disk (of the first, where one parameter is several tensors there), for whoever reads the report."""

    def writes(self, name: str) -> bool:
        return self.writers is None or name in self.writers

    def label(self, name: str) -> str:
        return self.stored.get(name, self.stored.get(name + ".weight", name))


def find_roles(model: nn.Module, bound: BoundModel) -> ParameterRoles:
    stored = stored_names(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # a tied head stays the table
    weights, writers, norms = [], set(), []
    # A norm in front of its readers may stay: they are solved on what it gives them.
    in_front = {norm.name + ".weight" for norm in bound.architecture.norms if isinstance(norm, Norm)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or id(parameter) in tables:
            continue
        spec_name = stored.get(name, name)
        layout = bound.layouts.get(spec_name)
        if parameter.dim() in (2, 3):
            weights.append(name)
            if layout is not None and _writes(layout):
                writers.add(name)
        elif name.endswith(".weight") and layout is not None and is_gain(layout) and spec_name not in in_front:
            norms.append(name.removesuffix(".weight"))
    known = any(RESIDUAL in layout.spaces() for layout in bound.layouts.values())
    return ParameterRoles(weights, norms, frozenset(writers) if known else None, stored)


def _writes(layout: Layout) -> bool:
    return layout.axis_of(RESIDUAL, dual=False) is not None and layout.axis_of(RESIDUAL, dual=True) is None


def stored_names(model: Any) -> dict[str, str]:
    """Name in memory -> (first) name on disk, by sending numbered tensors through the mapping transformers saves by."""
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    numbers = {name: torch.tensor(float(k), dtype=torch.float64) for k, name in enumerate(state)}
    numbered = {name: numbers[name].expand(tensor.shape) for name, tensor in state.items()}
    names = list(state)
    stored: dict[str, str] = {}
    for file, tensor in as_saved(model, numbered).items():
        stored.setdefault(names[int(tensor.flatten()[0])], file)
    return stored


def as_saved(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state under the names of memory as it would be stored; older transformers store it as it is."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    return dict(revert_weight_conversion(model, state))


def file_names(bound: BoundModel) -> dict[str, str]:
    """The name a saved tensor would have -> its name in this checkpoint, where old files call it otherwise."""
    pairs = (zip(saved_names(bound, name), files, strict=True) for name, files in bound.files.items())
    return dict(itertools.chain.from_iterable(pairs))


def saved_names(bound: BoundModel, name: str) -> list[str]:
    """A tensor of the specification as transformers would store it: under one name, or one for each expert."""
    return [re.sub(r"\{\w+\}", str(number), name) for number in range(len(bound.files[name]))]
