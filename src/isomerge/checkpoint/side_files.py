"""Which files of a model folder are neither weights nor config.json and belong with every copy of the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from isomerge.errors import CheckpointError
from isomerge.json_files import read_json

WEIGHT_SUFFIXES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack"),
    *(".onnx", ".onnx_data", ".ot", ".tflite", ".mlmodel", ".nemo", ".npz"),
}
# An adapter's description beside a merged model would make transformers look for the adapter.
# What speaks of how the donor was made would be untrue of the copy.
NOT_COPIED = {
    *("config.json", "adapter_config.json"),
    *("isomerge.lock.json", "isomerge.json", "report.html", "mergekit_config.yml"),
}

STEP = re.compile(r"checkpoint-\d+")
"""A folder of the trainer's: what it saved on the way."""


def is_weight(name: str) -> bool:
    """Weights in any format, and the index files that go with them."""
    return PurePosixPath(name).suffix in WEIGHT_SUFFIXES or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def choose_side_files(names: Iterable[str], modules: Iterable[str] = ()) -> list[str]:
    """The side files among all the files of a folder or repository (relative, with forward slashes), sorted.

    A subfolder that holds weights is the same model in another format (`onnx/`). It would be stale beside a merged
    model, and so would a step of its training (`checkpoint-500/`); those that sentence-transformers lists in
    modules.json are parts of it.

    >>> choose_side_files(["config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"])
    ['1_Pooling/config.json', 'tokenizer.json']
    """
    paths = [PurePosixPath(name) for name in names]
    parts = {module for module in modules if module}
    inside = [(path.parts[0], path.name) for path in paths if len(path.parts) > 1]
    stale = {top for top, name in inside if is_weight(name) or STEP.fullmatch(top)} - parts
    chosen = []
    for path in paths:
        top = path.parts[0]
        hidden = any(part.startswith(".") for part in path.parts)
        skip = is_weight(path.name) or str(path) in NOT_COPIED if len(path.parts) == 1 else top in stale
        if not hidden and not skip:
            chosen.append(str(path))
    return sorted(chosen)


def side_files_of(folder: Path) -> list[Path]:
    """The side files of a folder on disk."""
    names = [path.relative_to(folder).as_posix() for path in files_below(folder)]
    return [folder / name for name in choose_side_files(names, module_folders(folder / "modules.json"))]


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders. Path.rglob leaves out what it cannot read; this raises."""

    def unreadable(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    found = [Path(place, name) for place, _, names in os.walk(folder, onerror=unreadable) for name in names]
    return sorted(path for path in found if path.is_file())


def module_folders(modules_json: Path) -> list[str]:
    """The subfolders that sentence-transformers' modules.json names; none when there is no such file."""
    if not modules_json.is_file():
        return []
    try:
        modules = read_json(modules_json)
        return [str(module.get("path", "")) for module in modules]
    except OSError as error:
        raise _unreadable(modules_json, error) from error
    except (ValueError, AttributeError, TypeError):
        return []  # not a sentence-transformers folder, or one whose list says nothing: the general rule holds


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    cause = error.strerror or str(error)
    return CheckpointError(f"While reading {path}: {cause}. Check that it can be read, then run again.")
