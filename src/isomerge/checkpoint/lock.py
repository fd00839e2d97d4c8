"""The lock file: what went into a model and what came out, by hash, so that it can be checked and made again.

Nothing in it depends on the moment or the machine: the same merge writes the same text.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from isomerge import __version__
from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.checkpoint.hashing import hash_file, tensors_digest
from isomerge.errors import CheckpointError, near_miss
from isomerge.json_files import JsonError, parse_json

LOCK = "isomerge.lock.json"
FORMAT = 1
# They speak about the model and are no part of it: people may edit them, and a newer isomerge words them anew.
DESCRIPTIONS = {"README.md", "mergekit_config.yml", LOCK}


@dataclass(frozen=True)
class LockedTensor:
    """One tensor: the sha256 of its bytes as safetensors stores them (little-endian, row by row)."""

    sha256: str
    shape: tuple[int, ...]
    dtype: str
    file: str | None = None
    """The weight file of the output that holds it; None for inputs, which may be sharded anew without changing."""


@dataclass(frozen=True)
class LockedInput:
    """A model or adapter as it was read. `config_sha256` is of the bytes of its config.json or adapter_config.json."""

    reference: str
    """As the recipe names it; a model and the adapter on top of it share one."""
    source: str
    """What opens it: the path as it was given, or the hub id."""
    tensors: Mapping[str, LockedTensor]
    kind: str = "model"
    revision: str | None = None
    """The commit of a hub model."""
    config_sha256: str | None = None


@dataclass(frozen=True)
class Lock:
    """Everything that decides the bytes of an output, and the hashes of these bytes."""

    recipe: str
    inputs: tuple[LockedInput, ...]
    tensors: Mapping[str, LockedTensor]
    side_files: Mapping[str, str] = field(default_factory=dict)
    """sha256 of every other file written, config.json and the tokenizer's among them."""
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else matters: dtype, kind of device, block size."""
    documents: tuple[Any, ...] = ()
    """The documents of the recipe as plain values, for readers without a YAML parser."""
    versions: Mapping[str, str] = field(default_factory=lambda: current_versions())
    format: int = FORMAT

    @property
    def sha256(self) -> str:
        """One number for all the weights; it does not depend on how they are sharded."""
        return tensors_digest({name: tensor.sha256 for name, tensor in self.tensors.items()})

    def to_json(self) -> str:
        record = {
            "format": self.format,
            "versions": dict(self.versions),
            "recipe": self.recipe,
            "documents": list(self.documents),
            "seed": self.seed,
            "options": dict(self.options),
            "inputs": [asdict(entry) for entry in self.inputs],
            "output": {
                "sha256": self.sha256,
                "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()},
                "side_files": dict(self.side_files),
            },
        }
        text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        # A shape belongs on one line. No string can hold a raw line break, so only lists of numbers are meant.
        return re.sub(r"\[\n\s*([\d,\s]+?)\s*\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = LOCK) -> Lock:
        """Raises CheckpointError when the text is cut off, of a newer format, or does not agree with itself."""
        act = f"While reading {where}"
        try:
            record = parse_json(text)
        except JsonError as error:
            raise CheckpointError(
                f"{act}: it is cut off or not JSON ({error}). Copy it again, or write the model again."
            ) from error
        version = record.get("format") if isinstance(record, dict) else None
        if type(version) is int and version > FORMAT:
            raise CheckpointError(
                f"{act}: it has format {version} and this isomerge reads up to {FORMAT}. Install a newer isomerge."
            )
        try:
            lock = _parse(record)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{act}: it is not a lock file of isomerge ({what}). Copy it again, or write the model again."
            ) from error
        if lock.sha256 != record["output"].get("sha256"):
            raise CheckpointError(
                f"{act}: its sha256 is not that of the tensors it lists, so it was edited or damaged. Copy it again."
            )
        return lock


def current_versions() -> dict[str, str]:
    """What computes: another version of any of these may round differently."""
    return {"isomerge": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def locked_tensors(
    tensors: Mapping[str, TensorInfo], hashes: Mapping[str, str], files: Mapping[str, str] | None = None
) -> dict[str, LockedTensor]:
    """The entries of a lock for the tensors that were hashed; `files` says where an output's tensors lie."""
    return {
        name: LockedTensor(
            hashes[name], tensors[name].shape, str(tensors[name].dtype).removeprefix("torch."), (files or {}).get(name)
        )
        for name in sorted(hashes)
    }


def locked_input(reference: str, checkpoint: Checkpoint, hashes: Mapping[str, str]) -> LockedInput:
    """What the lock says about an input whose tensors have these hashes."""
    kind = "adapter" if adapter_config(checkpoint) else "model"
    return LockedInput(
        reference=reference,
        source=checkpoint.name,
        tensors=locked_tensors(checkpoint.tensors, hashes),
        kind=kind,
        revision=checkpoint.revision,
        config_sha256=config_sha256(checkpoint),
    )


def adapter_config(checkpoint: Checkpoint) -> Path | None:
    """An adapter has an adapter_config.json and, unlike a model that was saved beside one, no config.json."""
    path = checkpoint.folder / "adapter_config.json" if checkpoint.folder else None
    return path if path and path.is_file() and not path.with_name("config.json").is_file() else None


def config_sha256(checkpoint: Checkpoint) -> str | None:
    """sha256 of the bytes of the description of a model or adapter; None for what lives in memory."""
    path = adapter_config(checkpoint) or (checkpoint.folder / "config.json" if checkpoint.folder else None)
    return hash_file(path) if path and path.is_file() else None


def read_lock(folder: str | os.PathLike[str]) -> Lock:
    path = Path(folder) / LOCK
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        why = f"there is no {LOCK} in it" if path.parent.is_dir() else "there is no such folder"
        why = "it is a file and not a folder" if path.parent.is_file() else why
        raise CheckpointError(
            f"While reading the lock of {folder}: {why}, so nothing says what it was made from. "
            "Name a folder that was merged with lock=True (the default)."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"While reading {path}: {error}. Copy it again, or write the model again.") from error
    return Lock.from_json(text, where=str(path))


def _parse(record: Any) -> Lock:
    output = record["output"]
    known = {"format", "versions", "recipe", "documents", "seed", "options", "inputs", "output"}
    for key in sorted(record.keys() - known):
        raise ValueError(f"it has an unknown entry '{key}'. {near_miss(key, sorted(known))}".rstrip())
    return Lock(
        recipe=_text(record["recipe"]),
        inputs=tuple(
            LockedInput(**{**entry, "source": _text(entry["source"]), "tensors": _tensors(entry["tensors"])})
            for entry in record["inputs"]
        ),
        tensors=_tensors(output["tensors"]),
        side_files={_text(name): _text(digest) for name, digest in output["side_files"].items()},
        seed=int(record["seed"]),
        options=dict(record["options"]),
        documents=tuple(record["documents"]),
        versions=dict(record["versions"]),
        format=int(record["format"]),
    )


def _tensors(record: Mapping[str, Any]) -> dict[str, LockedTensor]:
    return {name: LockedTensor(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in record.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
