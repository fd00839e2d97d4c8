"""The classifiers of several models side by side in one: every label of every model, which a stock class can have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.layerwise.parents import ParentModels

LABELS = "_labels"


def outputs_apart(
    parents: ParentModels, states: Sequence[State], models: Sequence[Checkpoint]
) -> tuple[State, dict[str, Any], list[list[int]]]:
    """The tensors of the classifier, what config.json says of its labels, and for each model where its labels start and
    end."""
    axes = {
        parents.bound.files[name][0]: axis
        for name, layout in parents.bound.layouts.items()
        for axis, segments in enumerate(layout.axes)
        if segments[0].atoms[0].space == LABELS
    }
    if not axes:
        raise RequestError(
            "zipit: outputs can stay apart in a classifier only, and these models have none. Use the mean.",
            keys=("outputs",),
        )
    state = {file: torch.cat([one[file].double() for one in states], axis) for file, axis in axes.items()}
    count = states[0][next(iter(axes))].shape[axes[next(iter(axes))]]
    names = _labels([model.config for model in models], count)
    changes = {
        "id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)},
        **({"num_labels": len(names)} if "num_labels" in parents.config else {}),
    }  # fmt: skip
    ranges = [[k * count, (k + 1) * count] for k in range(len(states))]
    return state, changes, ranges


def _labels(configs: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """A name that several models have gets the model's number."""
    own = [_named(config, count) for config in configs]
    seen = Counter(name for names in own for name in names)
    return [name if seen[name] == 1 else f"{name} ({k})" for k, names in enumerate(own, start=1) for name in names]


def _named(config: Mapping[str, Any], count: int) -> list[str]:
    known = {int(place): str(name) for place, name in dict(config.get("id2label") or {}).items()}
    return [known.get(place, f"LABEL_{place}") for place in range(count)]
