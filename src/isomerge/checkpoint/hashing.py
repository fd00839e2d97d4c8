"""BLAKE3 of tensors and sha256 of files, read in blocks, so that hashing a model never needs much memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from isomerge.checkpoint.base import Checkpoint, Progress
from isomerge.threads import workers

BLOCK = 16 * 2**20  # bytes in memory for each thread
TENSOR_HASH = "blake3"
"""As secure as sha256 and five times as fast. Files keep sha256, which everybody's tools compute."""
TENSOR_HASHES: Mapping[str, Callable[[], Any]] = {TENSOR_HASH: blake3, "sha256": hashlib.sha256}
"""sha256: of locks of isomerge 0.1."""


def tensors_digest(hashes: Mapping[str, str]) -> str:
    """sha256 over the lines "NAME  HEX", sorted by name: what `b3sum` would write for one file per tensor.

    >>> tensors_digest({"b": "00", "a": "ff"}) == hashlib.sha256(b"a  ff\\nb  00\\n").hexdigest()
    True
    """
    return hashlib.sha256("".join(f"{name}  {hashes[name]}\n" for name in sorted(hashes)).encode("utf-8")).hexdigest()


def hash_tensors(
    checkpoint: Checkpoint,
    names: Iterable[str] | None = None,
    *,
    threads: int,
    tensor_hash: str = TENSOR_HASH,
    progress: Progress | None = None,
) -> dict[str, str]:
    """The hash of the bytes of every tensor (or of these), a block at a time and several tensors at once."""
    hashes: dict[str, str] = {}

    def hash_one(name: str, blocks: Iterator[torch.Tensor]) -> None:
        digest = TENSOR_HASHES[tensor_hash]()
        for block in blocks:
            digest.update(raw_bytes(block))
        hashes[name] = digest.hexdigest()

    scan_tensors(checkpoint, names, hash_one, threads=threads, progress=progress, what="hashing")
    return dict(sorted(hashes.items()))


def scan_tensors(
    checkpoint: Checkpoint,
    names: Iterable[str] | None,
    look: Callable[[str, Iterator[torch.Tensor]], None],
    *,
    threads: int,
    progress: Progress | None = None,
    what: str,
) -> None:
    """Let `look` see every tensor as an iterator of blocks; each block is good until the next one is asked for."""
    chosen = list(checkpoint.tensors if names is None else names)
    for name in chosen:
        if name not in checkpoint.tensors:
            checkpoint.unknown_tensor(name)
    # The largest first, so that no thread is left alone with one at the end.
    chosen.sort(key=lambda name: (-checkpoint.tensors[name].nbytes, name))
    total, done, counting = sum(checkpoint.tensors[name].nbytes for name in chosen), 0, threading.Lock()

    def counted(name: str) -> Iterator[torch.Tensor]:
        nonlocal done
        for block in blocks_of(checkpoint, name):
            yield block
            with counting:
                done += block.nbytes
                if progress:
                    progress(done, total, f"{what} {Path(checkpoint.name).name}")

    with workers(max(1, threads)) as pool:
        try:
            for future in [pool.submit(look, name, counted(name)) for name in chosen]:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def blocks_of(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    """A tensor in blocks of rows of about 16 MB, in the order of its bytes."""
    info = checkpoint.tensors[name]
    if len(info.shape) < 2 or info.nbytes <= BLOCK:
        yield checkpoint.read_rows(name, 0, info.shape[0] if info.shape else 1)
        return
    rows = max(1, BLOCK * info.shape[0] // info.nbytes)
    for start in range(0, info.shape[0], rows):
        yield checkpoint.read_rows(name, start, min(start + rows, info.shape[0]))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(BLOCK):
            digest.update(piece)
    return digest.hexdigest()
