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
from typing import Annotated, Any, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from isomerge import __version__
from isomerge.addresses import is_url
from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.checkpoint.hashing import TENSOR_HASH, hash_file, tensors_digest
from isomerge.errors import CheckpointError, NotFoundError, near_miss
from isomerge.json_files import JsonError, checked, parse_json, read_text

LOCK = "isomerge.lock.json"
FORMAT = 2  # 1, of isomerge 0.1, had no `tensor_hash`: it was sha256, and so was the name of each hash
# They speak about the model and are no part of it: people may edit them, and a newer isomerge words them anew.
DESCRIPTIONS = {"README.md", "mergekit_config.yml", LOCK}


@dataclass(frozen=True)
class LockedTensor:
    """One tensor: the hash of its bytes as safetensors stores them (little-endian, row by row)."""

    hash: str
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
    stored: Mapping[str, list[Any]] | None = None
    """Of a model behind a URL: size and tag (ETag or checksum) of each weight file, as its server named them."""


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
    tensor_hash: str = TENSOR_HASH
    """The function that the hash of every tensor is of."""

    @property
    def sha256(self) -> str:
        """One number for all the weights; it does not depend on how they are sharded."""
        return tensors_digest({name: tensor.hash for name, tensor in self.tensors.items()})

    def to_json(self) -> str:
        record = {
            "format": FORMAT,
            "tensor_hash": self.tensor_hash,
            "versions": dict(self.versions),
            "recipe": self.recipe,
            "documents": list(self.documents),
            "seed": self.seed,
            "options": dict(self.options),
            "inputs": [_plain(entry) for entry in self.inputs],
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
            stored = _read(record)
        except JsonError as error:
            raise CheckpointError(
                f"{act}: it is not a lock file of isomerge ({error}). Copy it again, or write the model again."
            ) from error
        lock = stored.lock()
        if lock.sha256 != stored.output.sha256:
            raise CheckpointError(
                f"{act}: its sha256 is not that of the tensors it lists, so it was edited or damaged. Copy it again."
            )
        return lock


def _plain(entry: LockedInput) -> dict[str, Any]:
    record = asdict(entry)
    if entry.stored is None:
        del record["stored"]
    return record


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
    kind = "adapter" if adapter_config(checkpoint) else checkpoint.kind
    return LockedInput(
        reference=reference,
        source=checkpoint.name,
        tensors=locked_tensors(checkpoint.tensors, hashes),
        kind=kind,
        revision=checkpoint.revision,
        config_sha256=config_sha256(checkpoint),
        stored=checkpoint.stored(),
    )


def adapter_config(checkpoint: Checkpoint) -> Path | None:
    """An adapter has an adapter_config.json and, unlike a model that was saved beside one, no config.json."""
    path = checkpoint.folder / "adapter_config.json" if checkpoint.folder and checkpoint.kind == "model" else None
    return path if path and path.is_file() and not path.with_name("config.json").is_file() else None


def config_sha256(checkpoint: Checkpoint) -> str | None:
    """sha256 of the bytes of the description of a model or adapter; None for what lives in memory."""
    if checkpoint.in_memory:
        return None
    path = adapter_config(checkpoint) or (checkpoint.folder / "config.json" if checkpoint.folder else None)
    return hash_file(path) if path and path.is_file() else None


def read_lock(folder: str | os.PathLike[str]) -> Lock:
    path = Path(folder) / LOCK
    if is_url(folder):
        from isomerge.checkpoint.remote import open_url

        model = open_url(os.fspath(folder))
        model.fetch([LOCK])
        path = model.folder / LOCK
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        why = f"there is no {LOCK} in it" if path.parent.is_dir() else "there is no such folder"
        why = "it is a file and not a folder" if path.parent.is_file() else why
        raise (CheckpointError if path.parent.exists() else NotFoundError)(
            f"While reading the lock of {folder}: {why}, so nothing says what it was made from. "
            "Name a folder that was merged with lock=True (the default)."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"While reading {path}: {error}. Copy it again, or write the model again.") from error
    return Lock.from_json(text, where=str(path))


# --- the file ---------------------------------------------------------------------------------------------------------
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Tensor(_Part):
    hash: Hash = Field(validation_alias=AliasChoices("hash", "sha256"))
    shape: list[Annotated[int, Field(ge=0, lt=2**63)]]
    dtype: str
    file: str | None = None

    def locked(self) -> LockedTensor:
        return LockedTensor(self.hash, tuple(self.shape), self.dtype, self.file)


class _Input(_Part):
    reference: str
    source: str
    tensors: dict[str, _Tensor]
    kind: str = "model"
    revision: str | None = None
    config_sha256: Hash | None = None
    stored: dict[str, Annotated[list[int | str | None], Field(min_length=2, max_length=2)]] | None = None

    def locked(self) -> LockedInput:
        tensors = {name: tensor.locked() for name, tensor in self.tensors.items()}
        return LockedInput(
            self.reference, self.source, tensors, self.kind, self.revision, self.config_sha256, self.stored
        )


class _Output(_Part):
    sha256: Hash
    tensors: dict[str, _Tensor]
    side_files: dict[str, str]


class _Data(BaseModel):
    """What the models were run on."""

    name: str
    sha256: str
    path: str | None
    open: dict[str, Any]


class _Options(BaseModel):
    """Those that `reproduce` uses."""

    device: str = "cpu"
    shard_size: str | int = "5GB"
    out_dtype: str | None = None
    copy_tokenizer: bool = True
    torch_threads: Annotated[int, Field(ge=1, le=2**16)] = 1
    data: list[_Data] = []


class _Stored(_Part):
    format: Annotated[int, Field(ge=1)]
    tensor_hash: Literal["blake3", "sha256"] = "sha256"
    versions: dict[str, str]
    recipe: str
    documents: list[Any]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    options: dict[str, Any]
    inputs: list[_Input]
    output: _Output

    def lock(self) -> Lock:
        return Lock(
            recipe=self.recipe,
            inputs=tuple(entry.locked() for entry in self.inputs),
            tensors={name: tensor.locked() for name, tensor in self.output.tensors.items()},
            side_files=self.output.side_files,
            seed=self.seed,
            options=self.options,
            documents=tuple(self.documents),
            versions=self.versions,
            tensor_hash=self.tensor_hash,
        )


def _read(record: Any) -> _Stored:
    if isinstance(record, dict):
        for key in sorted(record.keys() - _Stored.model_fields.keys()):
            raise JsonError(f"it has an unknown entry '{key}'. {near_miss(key, sorted(_Stored.model_fields))}".rstrip())
    stored = checked(_Stored, record)
    checked(_Options, stored.options)
    return stored
