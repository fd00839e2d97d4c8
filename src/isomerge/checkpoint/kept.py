"""What a run has solved before it writes its first tensor, kept in the output's staging folder for the same run again.

Each part is a safetensors file of its own, complete or not there; it is taken only by work of the same key, and only if
its tensors have the hash that was noted. The staging folder, and this with it, goes away when the output is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from isomerge import system
from isomerge.addresses import is_url
from isomerge.checkpoint.hashing import raw_bytes, tensors_digest
from isomerge.checkpoint.staging import SOLVED, disk_failure
from isomerge.choices import STAGING

Part = tuple[dict[str, Tensor], Any]
"""Tensors, and what else there is to know, as JSON."""


class KeptWork:
    """Parts of the work that `key` names, in the folder that the result will be written to."""

    def __init__(self, out: str | os.PathLike[str], key: str, prefix: str = "") -> None:
        if is_url(out):
            from isomerge.checkpoint.upload import local_place

            out = local_place(out)
        self.out, self.key, self._prefix = Path(out).expanduser(), key, prefix
        self._folder = self.out / STAGING / SOLVED

    def within(self, prefix: str) -> KeptWork:
        """Parts of a part of the work, whose names no other part uses."""
        return KeptWork(self.out, self.key, f"{self._prefix}{prefix}-")

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Forget everything when the work fails: only a run that was stopped is made again."""
        try:
            yield
        except Exception:
            self.discard()
            raise

    def load(self, name: str) -> Part | None:
        """A part, if a run of the same key has kept it whole."""
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                known = file.metadata() or {}
                # In memory of their own: BLAS rounds by how a tensor is aligned, and the file aligns to 8 bytes only.
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            record = json.loads(known.get("record", ""))
        except (OSError, SafetensorError, ValueError, RecursionError):
            return None
        if known.get("key") != self.key or known.get("name") != name or known.get("sha256") != _digest(tensors, record):
            return None
        strides, record = record
        return {key: _strided(tensor, strides[key]) for key, tensor in tensors.items()}, record

    def store(self, name: str, tensors: Mapping[str, Tensor], record: Any = None) -> None:
        """Keep a part: on the disk, then under its name."""
        here = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
        held = {key: tensor.contiguous().clone() for key, tensor in here.items()}
        strides = {key: list(tensor.stride()) for key, tensor in here.items()}
        record = json.loads(json.dumps([strides, record]))
        about = {"key": self.key, "name": name, "record": json.dumps(record), "sha256": _digest(held, record)}
        content = save(held, metadata=about)
        path = self._path(name)
        aside = path.with_name(path.name + ".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(content)
                system.sync(file)
            os.replace(aside, path)
            system.sync_folder(self._folder)
        except OSError as error:
            raise disk_failure(self.out, len(content), error) from error

    def discard(self) -> None:
        """Forget it all, and the folders that held nothing else."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{self.key[:16]}-*"):
                path.unlink()
            for folder in (self._folder, self._folder.parent, self.out):
                folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / f"{self.key[:16]}-{self._prefix}{name}.safetensors"


def _strided(tensor: Tensor, stride: list[int]) -> Tensor:
    """In the layout it had: a product with a transposed matrix may be rounded in another order."""
    if list(tensor.stride()) == stride or 0 in stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def work_key(**parts: Any) -> str:
    """One name for all that decides a result."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _digest(tensors: Mapping[str, Tensor], record: Any) -> str:
    hashes = {name: _hashed(tensor) for name, tensor in tensors.items()}
    return tensors_digest({**hashes, "record": hashlib.sha256(json.dumps(record).encode()).hexdigest()})


def _hashed(tensor: Tensor) -> str:
    """Of its bytes and of what they mean: a header that was damaged may give them another shape."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()
