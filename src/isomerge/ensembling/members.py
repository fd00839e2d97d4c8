"""Which models are in an ensemble: folders of snapshots unfolded, and whether all answer the same questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isomerge.adapters.adapter import require_model
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.side_files import STEP
from isomerge.data.base import Data
from isomerge.data.task_heads import label_names
from isomerge.errors import RequestError
from isomerge.evaluation.task_choice import require_fitting, task_name
from isomerge.running.stock import StockModel


def unfolded(models: Sequence[Any], snapshots: int | None = None) -> list[Any]:
    """A training run's folder becomes its `checkpoint-N` folders, the last `snapshots` of them, in order of N. A folder
    that is a model itself stays one, unless `snapshots` is given."""
    found: list[Any] = []
    for model in models:
        steps = snapshots_in(model)
        alone = bool(steps) and snapshots is None and (Path(model).expanduser() / "config.json").is_file()
        found += [model] if alone or not steps else steps[-snapshots:] if snapshots else steps
    return found


def snapshots_in(model: Any) -> list[str]:
    """The folders that a trainer saved on its way.

    >>> snapshots_in("no-such-folder")
    []
    """
    if not isinstance(model, (str, os.PathLike)) or not (folder := Path(model).expanduser()).is_dir():
        return []
    steps = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return [str(path) for path in sorted(steps, key=lambda path: int(path.name.rpartition("-")[2]))]


def open_members(models: Sequence[Any], task: str | None, data: Data | None = None) -> tuple[list[Checkpoint], str]:
    """All checkpoints, and the task they share, which must fit the data."""
    checkpoints = [open_checkpoint(model) for model in models]
    for checkpoint in checkpoints:
        require_model(checkpoint)
    names = [task_name(checkpoint.config, task, checkpoint.name) for checkpoint in checkpoints]
    for checkpoint, name in zip(checkpoints, names, strict=True):
        if data is not None:
            require_fitting(data, name, checkpoint.name)
        if name != names[0]:
            raise RequestError(
                f"Taking {checkpoints[0].name} and {checkpoint.name} together: one is for '{names[0]}', the other for "
                f"'{name}'. Name models of one task."
            )
        own, theirs = label_names(checkpoints[0].config), label_names(checkpoint.config)
        if own != theirs and sorted(own) == sorted(theirs):
            raise differ(checkpoints[0], checkpoint)
    return checkpoints, names[0]


def load_member(model: Any, checkpoint: Checkpoint, device: str | None) -> StockModel:
    """A module is used as it is, in evaluation mode; everything else is loaded into its stock class."""
    if not isinstance(model, nn.Module):
        return StockModel.load(checkpoint, device or "cpu")
    module: Any = model
    home = device or str(next(module.parameters()).device)
    return StockModel(checkpoint, module.to(home).eval(), home)


def home_of(one: StockModel) -> torch.device:
    """Where its weights are now: an ensemble can be moved like any module."""
    found: torch.device = next(one.module.parameters()).device
    return found


def differ(first: Checkpoint, other: Checkpoint) -> RequestError:
    return RequestError(
        f"Taking {first.name} and {other.name} together: they do not answer the same questions "
        "on this data; their labels differ or are in another order, or their tokenizers cut the text differently. Name "
        "models with the same labels, and for texts to be predicted with the same tokenizer."
    )
