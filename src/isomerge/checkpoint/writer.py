"""Write a checkpoint as a stream: the plan gives every header in advance, then one tensor at a time is in memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isomerge.checkpoint.base import Checkpoint, TensorInfo
from isomerge.checkpoint.disk import check_space, disk_failure
from isomerge.checkpoint.shards import Shard, TensorStream, index_text, split_shards, sync
from isomerge.checkpoint.staging import Staging
from isomerge.checkpoint.units import parse_size
from isomerge.errors import RequestError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Written:
    """What is now on disk. `bytes` counts the weight files; `sha256` is of those files, one after the other."""

    out: Path
    files: tuple[Path, ...]
    tensors: int
    bytes: int
    sha256: str


def write_checkpoint(
    out: str | os.PathLike[str],
    plan: Mapping[str, TensorInfo],
    produce: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Mapping[str, Any] | None = None,
    donor: Checkpoint | None = None,
    shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write the tensors that `produce` yields, in the plan's order, as a folder that loads in the stock library.

    `config` holds what changes in the donor's config.json (all of it when there is no donor); the donor's side files
    are copied. `progress` is told the bytes of each piece written. After any failure nothing new looks finished.
    """
    out = Path(out).expanduser()
    if not plan:
        raise RequestError(f"While preparing to write {out}: the plan holds no tensor. Check the models and filters.")
    shards = split_shards(plan, parse_size(shard_size))
    layout = {name: Shard(tensors, metadata or {}) for name, tensors in shards.items()}
    copies = side_copies(donor)
    texts = {} if len(shards) == 1 else {INDEX: index_text(shards)}
    config_json = config_text(config, donor)
    if config_json is not None:
        texts["config.json"] = config_json  # the last: a folder without it does not load
    weight_bytes = sum(shard.nbytes for shard in layout.values())
    needed = weight_bytes + sum(path.stat().st_size for path in copies.values()) + sum(map(len, texts.values()))
    check_space(out, needed)

    stream = TensorStream(produce, out)
    digest = hashlib.sha256()
    try:
        with Staging(out, force=force) as staging:
            for name, shard in layout.items():
                with staging.create(name) as file:
                    shard.write(file, stream, digest, progress)
            stream.end()
            for name, path in copies.items():
                with path.open("rb") as source, staging.create(name) as file:
                    shutil.copyfileobj(source, file)
                    sync(file)
            for name, text in texts.items():
                with staging.create(name) as file:
                    file.write(text)
                    sync(file)
            files = [*layout, *copies, *texts]
            staging.commit(last=list(texts or layout)[-1])
    except OSError as error:
        if error is stream.error:
            raise
        raise disk_failure(out, needed, error) from error
    return Written(out, tuple(out / name for name in files), len(plan), weight_bytes, digest.hexdigest())


def config_text(changes: Mapping[str, Any] | None, donor: Checkpoint | None) -> bytes | None:
    """The donor's config.json with the changes made: its own bytes when nothing changes, its key order otherwise."""
    before = donor.config if donor else {}
    after = {**before, **(changes or {})}
    if not after:
        return None
    original = donor.folder / "config.json" if donor and donor.folder else None
    if original and original.is_file() and json.loads(original.read_bytes()) == after:
        return original.read_bytes()
    return (json.dumps(after, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def side_copies(donor: Checkpoint | None) -> dict[str, Path]:
    """The donor's side files by the name each will have in the output."""
    if donor is None or donor.folder is None:
        return {}
    folder = donor.folder
    return {path.relative_to(folder).as_posix(): path for path in donor.side_files()}
