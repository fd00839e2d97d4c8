"""A student that has not learned anything: the class and sizes of a config.json with the weights its class draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from isomerge.checkpoint.config import config_problems
from isomerge.checkpoint.identity import described
from isomerge.checkpoint.local import read_config
from isomerge.checkpoint.memory import quiet_transformers, saved_state
from isomerge.checkpoint.side_files import side_files_of
from isomerge.checkpoint.stock_classes import class_config, not_built
from isomerge.errors import NotFoundError
from isomerge.running.stock import stock_class


class FreshStudent(Checkpoint):
    """Random weights under the names of the disk. The seed and the config decide them, whatever else is drawn."""

    kind = "fresh"

    def __init__(
        self, name: str, config: dict[str, Any], folder: Path | None, side_files: Callable[[], list[Path]], seed: int
    ) -> None:
        self.name, self.config, self.folder, self.revision, self.seed = name, config, folder, None, seed
        self._side_files, self._state = side_files, _drawn(config, folder, seed)
        self.tensors = {key: TensorInfo.of(self._state[key]) for key in sorted(self._state)}

    def read(self, name: str) -> Tensor:
        if name not in self._state:
            self.unknown_tensor(name)
        return self._state[name].clone()

    def identity(self) -> Any:
        return {"fresh": self.seed, "beside": described(self)}

    def side_files(self) -> list[Path]:
        return self._side_files()


def fresh_student(source: Any, seed: int) -> FreshStudent:
    """From a folder, with or without weights, or whatever else stands for a model."""
    folder = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    if folder is not None and folder.is_dir():
        problems: list[str] = []
        config = read_config(folder / "config.json", problems)
        problems += config_problems(config, 0)
        if problems or not config:
            why = "; ".join(problems) or "there is no config.json in it"
            raise NotFoundError(f"Making a fresh student of {source}: {why}. Name a folder with the student's config.")
        return FreshStudent(str(source), config, folder, lambda: side_files_of(folder), seed)
    like = open_checkpoint(source)
    return FreshStudent(like.name, dict(like.config), like.folder, like.side_files, seed)


def _drawn(config: dict[str, Any], folder: Path | None, seed: int) -> dict[str, Tensor]:
    kind = stock_class(config, folder)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        try:
            model = kind(class_config(kind, config)).float()
        except Exception as error:  # whatever transformers meets in numbers that no model has
            raise not_built(kind, error) from error
    return {name: tensor.detach().clone() for name, tensor in saved_state(model, "the fresh student").items()}
