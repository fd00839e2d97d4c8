"""Checkpoints on disk: a folder, or a single file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint, TensorInfo, WeightFile, failure, name_some
from isomerge.checkpoint.config import config_problems
from isomerge.checkpoint.files import open_weight_file
from isomerge.checkpoint.header import HeaderError
from isomerge.checkpoint.identity import deciding_files, described
from isomerge.checkpoint.side_files import is_weight, side_files_of
from isomerge.checkpoint.staging import was_interrupted
from isomerge.checkpoint.stamp import Stamp
from isomerge.errors import CheckpointError
from isomerge.json_files import JsonError, read_json

# In the order in which transformers itself looks for them.
SINGLE_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DIFFUSION = "diffusion_pytorch_model"
"""How diffusers calls the weights of a component."""
ONE_COMPONENT = (f"{DIFFUSION}.safetensors", f"{DIFFUSION}.safetensors.index.json")
AGAIN = "Download or copy the named files again, then run again."


class FileCheckpoint(Checkpoint):
    """A checkpoint made of weight files, already here or fetched on the first read."""

    def __init__(
        self,
        name: str,
        files: Mapping[str, WeightFile],
        *,
        config: dict[str, Any],
        folder: Path,
        revision: str | None = None,
        side_files: Callable[[], list[Path]],
    ) -> None:
        """`files` says for every tensor which file holds it."""
        self.name, self.config, self.folder, self.revision = name, config, folder, revision
        self._files = files
        self._side_files = side_files
        self.tensors: Mapping[str, TensorInfo] = {tensor: files[tensor].tensors[tensor] for tensor in sorted(files)}
        self._deciding = deciding_files(folder) if revision is None else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle or a copy: the files have been opened again, and must be what they were."""
        self.__dict__ |= state
        other = [name for name, file in self._files.items() if file.tensors.get(name) != self.tensors[name]]
        if other:
            step = "Open the model anew."
            raise failure(f"opening {self.name} again", [f"{name_some(other)} has changed in the meantime"], step)

    def read(self, name: str) -> torch.Tensor:
        return self._file(name).read(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._file(name).read_rows(name, start, stop)

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._file(name).read_span(name, start, stop)

    def read_spans(self, name: str, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        return self._file(name).read_spans(name, places)

    def _file(self, name: str) -> WeightFile:
        if name not in self._files:
            self.unknown_tensor(name)
        return self._files[name]

    def files(self) -> list[WeightFile]:
        """The weight files, each once."""
        return list(dict.fromkeys(self._files.values()))

    def names(self) -> list[str]:
        """All files in the folder, without those of its subfolders."""
        assert self.folder is not None
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def identity(self) -> Any:
        if self.revision is not None:
            return self.revision
        files = {file.label: file.identity() for file in self._files.values()}
        return None if None in files.values() else {"weights": sorted(files.items()), "beside": described(self)}

    def changed(self) -> list[Path | str]:
        weights = [path for file in self.files() for path in file.changed()]
        return weights + [path for path, stamp in self._deciding.items() if Stamp.of(path) != stamp]

    def side_files(self) -> list[Path]:
        return self._side_files()


def open_folder(
    folder: Path, *, name: str | None = None, revision: str | None = None, next_step: str = AGAIN
) -> FileCheckpoint:
    """Open every header of a folder; whatever is wrong is told at once."""
    from isomerge.checkpoint.formats.pipeline import is_pipeline, open_pipeline  # which is made of these

    if is_pipeline(folder):
        return open_pipeline(folder, name=name, revision=revision, next_step=next_step)
    name = name or str(folder)
    act = f"opening checkpoint {name}"
    if was_interrupted(folder):
        raise CheckpointError(
            f"While {act}: the write that was to fill this folder was interrupted, so it is incomplete. "
            "Write it again; an unfinished folder is replaced."
        )
    problems: list[str] = []
    config = read_config(folder / "config.json", problems)
    shards, weight_map = find_shards(folder, act, problems, (*SINGLE_OR_INDEX, *ONE_COMPONENT))
    opened: dict[str, WeightFile] = {}
    steps: list[str] = []
    for shard in shards:
        try:
            opened[shard] = open_weight_file(folder / shard)
        except HeaderError as error:
            problems.append(f"{shard}: {error}")
            steps.append(error.next_step)
    files = assign_tensors(opened, weight_map, problems)
    problems += config_problems(config, len(files))
    if problems:
        raise failure(act, problems, " ".join(dict.fromkeys(filter(None, steps))) or next_step)
    opened_folder = FileCheckpoint(
        name, files, config=config, folder=folder, revision=revision, side_files=partial(side_files_of, folder)
    )
    if any(shard.startswith(DIFFUSION) for shard in shards):
        opened_folder.stems = {"": DIFFUSION}
    return opened_folder


def open_file(path: Path) -> Checkpoint:
    """A single weight file; the folder around it counts as its model folder only when a config.json is there."""
    problems: list[str] = []
    config_file = path.parent / "config.json"
    config = read_config(config_file, problems)
    files: dict[str, WeightFile] = {}
    step = AGAIN
    try:
        file = open_weight_file(path)
        files = {tensor: file for tensor in file.tensors}
    except HeaderError as error:
        problems.append(f"{path.name}: {error}")
        step = error.next_step or AGAIN
    problems += config_problems(config, len(files))
    if problems:
        raise failure(f"opening checkpoint {path}", problems, step)
    beside = partial(side_files_of, path.parent) if config_file.is_file() else list
    return FileCheckpoint(str(path), files, config=config, folder=path.parent, side_files=beside)


def find_shards(
    folder: Path, act: str, problems: list[str], names: Sequence[str] = SINGLE_OR_INDEX
) -> tuple[list[str], dict[str, str] | None]:
    """The weight files to open, and the index's weight_map when there is an index; the first of `names` counts."""
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        if name not in present:
            continue
        if not name.endswith(".index.json"):
            return [name], None
        weight_map = read_index((folder / name), problems)
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        for shard in missing:
            link = folder / shard
            why = broken_link(link) if link.is_symlink() else f"named by {name} but not in the folder"
            problems.append(f"{shard}: {why}")
        return [shard for shard in shards if shard not in missing], weight_map
    # One other safetensors file (an adapter, a diffusion part) is unambiguous; several are not.
    others = [name for name in present if name.endswith(".safetensors")]
    if len(others) == 1:
        return others, None
    raise CheckpointError(f"While {act}: {_nothing_to_open(folder, present, others)}")


def only_gguf(folder: Path) -> str | None:
    """The GGUF file of a folder that holds one model as GGUF and no other weights: its first part."""
    try:
        names = sorted(path.name for path in folder.iterdir() if is_weight(path.name))
    except OSError:
        return None
    first = [name for name in names if name.endswith(".gguf") and not re.search(r"-\d{5}-of-\d{5}\.gguf$", name)]
    first += [name for name in names if re.search(r"-00001-of-\d{5}\.gguf$", name)]
    return first[0] if len(first) == 1 and all(name.endswith(".gguf") for name in names) else None


def broken_link(link: Path) -> str:
    """What a link is that leads to no file; the hub's cache is made of links, and its files can be gone."""
    target = os.readlink(link)
    try:
        link.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"it is a link that leads back to itself (by {target})"
    return f"it is a link to {target}, which is not there"


def read_index(path: Path, problems: list[str]) -> dict[str, str]:
    """The weight_map of an index; names that would leave the folder are refused before anything is opened."""
    try:
        weight_map = read_json(path)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name}: it is not an index with a weight_map ({error})")
        return {}
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.append(f"{path.name}: its weight_map is not a table from tensor names to file names")
        return {}
    # By text and not by resolving links: the hub's cache is made of links that leave the folder.
    outside = sorted(shard for shard in set(weight_map.values()) if not stays_inside(shard))
    if outside:
        problems.append(f"{path.name}: it points outside the folder or at no weight file ({name_some(outside)})")
    return {tensor: shard for tensor, shard in weight_map.items() if shard not in outside}


def stays_inside(shard: str) -> bool:
    """Whether a file name from an index stays in its folder on every system, and is a weight file.

    >>> stays_inside("model-00001-of-00002.safetensors"), stays_inside("../secret.safetensors")
    (True, False)
    """
    windows = PureWindowsPath(shard)
    anchored = PurePosixPath(shard).is_absolute() or bool(windows.anchor)
    return not anchored and ".." not in windows.parts and windows.suffix in {".safetensors", ".bin"}


def assign_tensors(
    opened: Mapping[str, WeightFile], weight_map: Mapping[str, str] | None, problems: list[str]
) -> dict[str, WeightFile]:
    """Which file to read each tensor from. The index decides; tensors it forgot are taken where they lie, as
    transformers takes them, unless two files have them."""
    files: dict[str, WeightFile] = {}
    absent: dict[str, list[str]] = {}
    for tensor, shard in sorted((weight_map or {}).items()):
        if shard not in opened:
            continue  # a missing or corrupt shard has been reported already
        if tensor in opened[shard].tensors:
            files[tensor] = opened[shard]
        else:
            absent.setdefault(shard, []).append(tensor)
    problems.extend(
        f"{shard}: the index puts {name_some(names)} in it, but it has none" for shard, names in absent.items()
    )
    for shard, file in sorted(opened.items()):
        for tensor in file.tensors:
            owner = files.setdefault(tensor, file)
            if owner is not file and tensor not in (weight_map or {}):
                problems.append(f"{shard}: tensor '{tensor}' is also in {owner.label} and the index names neither")
    return files


def read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = read_json(path, infinite=True)
    except FileNotFoundError:
        return {}
    except (OSError, JsonError) as error:
        problems.append(f"{path.name}: {error}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{path.name}: it holds a {type(config).__name__} and not an object")
        return {}
    return config


def _nothing_to_open(folder: Path, present: list[str], others: list[str]) -> str:
    broken = sorted(p for p in folder.iterdir() if p.is_symlink() and not p.exists() and is_weight(p.name))
    if broken:
        return f"{broken[0].name}: {broken_link(broken[0])}. Repair the link, or download or copy the model again."
    if others:
        return (
            f"there is no model.safetensors and no model.safetensors.index.json, but several other files "
            f"({name_some(others)}). Name one of them, or restore the index."
        )
    weights = [name for name in present if is_weight(name)]
    weights = weights or [f"{p.parent.name}/{p.name}" for p in sorted(folder.glob("*/*")) if is_weight(p.name)]
    if weights:
        return f"the only weights are {name_some(weights)}{unreadable(weights[0])}"
    if not present and not any(folder.iterdir()):
        return "the folder is empty. Name a folder that holds model.safetensors, or a hub id like org/name."
    held = present or sorted(f"{path.name}/" for path in folder.iterdir())
    return (
        f"the folder holds no weights (it has {name_some(held)}). "
        "Name a folder that holds model.safetensors, or a hub id like org/name."
    )


def unreadable(name: str) -> str:
    """How to go on from weights that cannot be opened as they are: the end of a sentence that names them.

    >>> unreadable("model-Q4_K_M.gguf")
    '. Name one file itself, or make a folder of it (isomerge convert FILE -o OUT).'
    """
    suffix = PurePosixPath(name).suffix
    if suffix == ".gguf":
        return ". Name one file itself, or make a folder of it (isomerge convert FILE -o OUT)."
    if suffix == ".ggml":
        return ", from before GGUF. Use the safetensors model they were made from."
    if suffix in (".onnx", ".onnx_data"):
        return (
            ", a graph of operations whose weights have no names of a model class. ONNX is not read or written: merge "
            "the safetensors model, then export the result (optimum-cli export onnx)."
        )
    if suffix in (".safetensors", ".bin"):
        return f". Name the folder that holds them, '{PurePosixPath(name).parent}'."
    return (
        ", in a format isomerge does not read. Use the model's safetensors; or load it once with transformers and save "
        "it with save_pretrained."
    )
