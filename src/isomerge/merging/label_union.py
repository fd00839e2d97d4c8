"""Heads of classifiers with other labels: which tensors they are, and one head for the labels of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.adapters.layout import ModuleLayout
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.memory import quiet_transformers
from isomerge.checkpoint.stock_classes import class_config, named_class
from isomerge.data.task_heads import label_names
from isomerge.errors import RequestError


@dataclass(frozen=True)
class LabelUnion:
    """The labels of several models, each once, in the order of the models."""

    labels: list[str]
    places: list[list[int]]
    """For each model the place of each of its outputs."""

    @classmethod
    def of(cls, names: Sequence[Sequence[str]]) -> LabelUnion:
        """
        >>> LabelUnion.of([["cat", "dog"], ["Dog", "bird"]])
        LabelUnion(labels=['cat', 'dog', 'bird'], places=[[0, 1], [1, 2]])
        """
        found: dict[str, int] = {}
        places = [[found.setdefault(_plain(name), len(found)) for name in own] for own in names]
        spelled = {_plain(name): name for own in reversed(names) for name in reversed(own)}
        return cls([spelled[name] for name in found], places)

    def joined(self, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One row per label: that of the model that has it, or the mean of those that do."""
        rows: list[list[tuple[float, Tensor]]] = [[] for _ in self.labels]
        for part, own, weight in zip(parts, self.places, weights, strict=True):
            for place, row in zip(own, part.double(), strict=True):
                rows[place].append((weight, row))
        return torch.stack([_mean(those) for those in rows])

    def config(self) -> dict[str, dict[str, str] | dict[str, int]]:
        return {
            "id2label": {str(number): name for number, name in enumerate(self.labels)},
            "label2id": {name: number for number, name in enumerate(self.labels)},
        }


def head_tensors(checkpoint: Checkpoint) -> set[str]:
    """The tensors, by name on disk, with a row for each label: those that change when the class is built with one more
    label."""
    kind, layout = named_class(checkpoint.config), ModuleLayout(checkpoint)
    names = label_names(checkpoint.config)
    more = LabelUnion([*names, "one more"], []).config()
    if kind is None or layout.model is None:
        raise RequestError(
            f"Joining the labels of {checkpoint.name}: transformers has no class of that name in config.json, so "
            "nothing says which tensors are its head."
        )
    with quiet_transformers(), torch.device("meta"):
        own, longer = (_shapes(kind, {**checkpoint.config, **change}) for change in ({}, more))
    heads = {name for name, shape in own.items() if longer[name] != shape}
    wrong = [name for name in heads if own[name][1:] != longer[name][1:] or own[name][0] != len(names)]
    if wrong or not heads:
        raise RequestError(
            f"Joining the labels of {checkpoint.name}: a {kind.__name__} has no head with one row per label. Name "
            "classifiers of images, texts or words."
        )
    return {layout.on_disk.get(name, name) for name in heads}


def _shapes(kind: type, config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    config = {key: value for key, value in config.items() if key != "num_labels"}
    return {name: tuple(one.shape) for name, one in kind(class_config(kind, config)).named_parameters()}


def _mean(rows: Sequence[tuple[float, Tensor]]) -> Tensor:
    """By their weights; of models that are not in the body, equally."""
    if len(rows) == 1:
        return rows[0][1]
    whole = sum(weight for weight, _ in rows)
    return torch.stack([row * (weight / whole if whole else 1 / len(rows)) for weight, row in rows]).sum(0)


def _plain(label: str) -> str:
    return " ".join(label.split()).casefold()
