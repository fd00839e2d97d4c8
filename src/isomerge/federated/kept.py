"""The global model on the server's disk after every round, so that a server that was killed goes on from it.

`keep/round-00012/` is the model after round 12, as save_pretrained would write it: model.safetensors and config.json,
or an adapter's two files. It is written aside and renamed, and the round before is deleted after that: whenever the
server dies, one whole model is there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from isomerge import system
from isomerge.adapters.adapter import WEIGHTS
from isomerge.checkpoint.local import open_file
from isomerge.errors import CheckpointError, RequestError
from isomerge.federated.clients import State
from isomerge.json_files import JsonError, read_json

ROUND = re.compile(r"round-(\d+)")
MODEL, ADAPTER = ("model.safetensors", "config.json"), (WEIGHTS[0], "adapter_config.json")


@dataclass(frozen=True)
class Kept:
    """The model after a round."""

    round: int
    state: dict[str, Tensor]
    config: dict[str, Any] | None


def store(folder: Path, number: int, state: State, config: Mapping[str, Any] | None, *, adapter: bool = False) -> None:
    """Write the model after this round, and then delete those of earlier ones."""
    weights, about = ADAPTER if adapter else MODEL
    aside = folder / f".round-{number:05}.partial"
    target = folder / f"round-{number:05}"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a server that was killed here
        aside.mkdir(parents=True)
        content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        _write(aside / weights, save(content, metadata={"format": "pt"}))
        if config is not None:
            _write(aside / about, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
        system.sync_folder(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        system.sync_folder(folder)
        for earlier, path in _rounds(folder).items():
            if earlier != number:
                shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(
            f"Keeping the model of round {number} in {folder}: {error}. Make room there, or name another with keep."
        ) from error


def latest(folder: Path, like: State, *, adapter: bool = False, may_grow: bool = False) -> Kept | None:
    """The model of the last round, which must have the tensors of `like`; nothing where no round has ended yet."""
    rounds = _rounds(folder)
    if not rounds:
        return None
    number = max(rounds)
    weights, about = ADAPTER if adapter else MODEL
    path = rounds[number]
    if not (path / weights).is_file():
        raise CheckpointError(
            f"Going on from {path}: it has no {weights}. Remove the folder, or name another with keep."
        )
    stored = open_file(path / weights)
    state = {name: stored.read(name).clone() for name in stored.tensors}
    if state.keys() != like.keys() or (
        not may_grow and any(tensor.shape != like[name].shape for name, tensor in state.items())
    ):
        raise RequestError(
            f"Going on from {path}: it is another model than the one to start from. Name another folder with keep.",
            keys=("keep",),
        )
    return Kept(number, {name: state[name] for name in like}, _config(path / about))


def _config(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        config = read_json(path, infinite=True)
    except (OSError, JsonError) as error:
        raise CheckpointError(f"Going on from {path}: {error}. Remove its folder to start anew.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"Going on from {path}: it is no table of settings. Remove its folder to start anew.")
    return config


def _rounds(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = [(ROUND.fullmatch(path.name), path) for path in folder.iterdir()]
    return {int(match[1]): path for match, path in found if match is not None}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        system.sync(file)
