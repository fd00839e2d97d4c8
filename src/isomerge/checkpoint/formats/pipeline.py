"""A folder of diffusers: model_index.json, and a folder for each component. All weights are one checkpoint, in which a
tensor is called `unet/down_blocks.0…`: the component, a slash, and its name there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isomerge.checkpoint.base import TensorInfo, WeightFile, failure
from isomerge.checkpoint.files import SpannedFile, open_weight_file
from isomerge.checkpoint.header import HeaderError
from isomerge.checkpoint.local import AGAIN, DIFFUSION, FileCheckpoint, assign_tensors, find_shards, read_config
from isomerge.checkpoint.side_files import files_below, is_weight
from isomerge.checkpoint.staging import was_interrupted
from isomerge.errors import CheckpointError

INDEX = "model_index.json"
NAMES = (
    f"{DIFFUSION}.safetensors", f"{DIFFUSION}.safetensors.index.json", "model.safetensors",
    "model.safetensors.index.json", f"{DIFFUSION}.bin", f"{DIFFUSION}.bin.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
"""In the order in which diffusers and transformers look for weights."""
COMPONENT = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")
NOT_COPIED = {INDEX, "isomerge.lock.json", "isomerge.json", "report.html", "mergekit_config.yml"}


class ComponentFile(WeightFile):
    """A weight file of one component, its tensors under their names in the pipeline."""

    def __init__(self, component: str, file: WeightFile) -> None:
        self._front, self._file = f"{component}/", file
        self.label = self._front + file.label
        self.tensors: Mapping[str, TensorInfo] = {self._front + name: info for name, info in file.tensors.items()}

    def metadata(self) -> dict[str, str]:
        return self._file.metadata() if isinstance(self._file, SpannedFile) else {"format": "pt"}

    def identity(self) -> Any:
        return self._file.identity()

    def changed(self) -> Sequence[Path | str]:
        return self._file.changed()

    def read(self, name: str) -> torch.Tensor:
        return self._file.read(name.removeprefix(self._front))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._file.read_rows(name.removeprefix(self._front), start, stop)

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._file.read_span(name.removeprefix(self._front), start, stop)

    def read_spans(self, name: str, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        return self._file.read_spans(name.removeprefix(self._front), places)


class PipelineCheckpoint(FileCheckpoint):
    """`config` is model_index.json; those of components are side files."""

    description = INDEX


def is_pipeline(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def open_pipeline(
    folder: Path, *, name: str | None = None, revision: str | None = None, next_step: str = AGAIN
) -> PipelineCheckpoint:
    """Open the headers of every component; whatever is wrong is told at once."""
    name = name or str(folder)
    act = f"opening pipeline {name}"
    if was_interrupted(folder):
        raise CheckpointError(
            f"While {act}: the write that was to fill this folder was interrupted, so it is incomplete. "
            "Write it again; an unfinished folder is replaced."
        )
    problems: list[str] = []
    index = read_config(folder / INDEX, problems)
    files: dict[str, WeightFile] = {}
    stems: dict[str, str] = {}
    for component in _components(index, problems):
        if not _has_weights(folder / component):
            continue  # a tokenizer, a scheduler, an image processor
        inside, stem = _open_component(folder, component, act, problems)
        files |= inside
        stems[component] = stem
    if not files and not problems:
        problems.append(f"{INDEX} names no component that holds weights")
    if problems:
        raise failure(act, problems, next_step)
    found = PipelineCheckpoint(
        name, files, config=index, folder=folder, revision=revision, side_files=partial(_beside, folder)
    )
    found.stems = stems
    return found


def _components(index: Mapping[str, Any], problems: list[str]) -> list[str]:
    """Names of folders: an entry is [library, class], and [null, null] where a component was left out."""
    found = []
    for key, value in index.items():
        if key.startswith("_") or not isinstance(value, list) or len(value) != 2 or value[0] is None:
            continue
        if not COMPONENT.fullmatch(key):
            problems.append(f"{INDEX}: '{key[:60]}' is not the name of a folder")
            continue
        found.append(key)
    return sorted(found)


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(is_weight(path.name) for path in folder.iterdir())


def _open_component(folder: Path, component: str, act: str, problems: list[str]) -> tuple[dict[str, WeightFile], str]:
    inside: list[str] = []
    shards, weight_map = find_shards(folder / component, f"{act}, {component}", inside, NAMES)
    opened: dict[str, WeightFile] = {}
    for shard in shards:
        try:
            opened[shard] = open_weight_file(folder / component / shard)
        except HeaderError as error:
            inside.append(f"{shard}: {error}")
    files = assign_tensors(opened, weight_map, inside)
    problems += [f"{component}/{problem}" for problem in inside]
    wrapped = {id(file): ComponentFile(component, file) for file in opened.values()}
    stem = DIFFUSION if any(shard.startswith(DIFFUSION) for shard in shards) else "model"
    return {f"{component}/{tensor}": wrapped[id(file)] for tensor, file in files.items()}, stem


def _beside(folder: Path) -> list[Path]:
    """Configs, tokenizers, schedulers: all that holds no weights, so that another variant of them is not copied."""
    found = []
    for path in files_below(folder):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and not is_weight(path.name) and (len(parts) > 1 or path.name not in NOT_COPIED):
            found.append(path)
    return found
