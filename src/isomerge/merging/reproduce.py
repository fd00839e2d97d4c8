"""`isomerge.reproduce`: make a model again from its lock file, and compare every hash."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isomerge.adapters import apply_adapter, open_adapter
from isomerge.adapters.diffusion import KIND, open_diffusion_adapter
from isomerge.addresses import is_url, usable_url
from isomerge.arguments import require_shared_types, require_types
from isomerge.checkpoint.base import Checkpoint, Progress, name_some
from isomerge.checkpoint.formats.decoded import STORED
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.checkpoint.lock import Lock, LockedInput, config_sha256, locked_tensors, read_lock
from isomerge.checkpoint.open import open_checkpoint
from isomerge.data import open_data
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.evaluation.verify import differences
from isomerge.merging.api import merge_recipe
from isomerge.merging.distillation.fresh_student import fresh_student
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.results import Result
from isomerge.running.stock import run_versions
from isomerge.threads import thread_count


@dataclass
class Reproduction(Result):
    """A model made again from its lock file, and how it compares."""

    folder: str
    verdict: str
    """identical, different or "inputs changed"; then nothing was run"""
    inputs: list[dict[str, Any]]
    """What changed, by `reference`."""
    differences: list[str]
    expected_sha256: str
    sha256: str | None
    out: str | None
    notes: list[str]
    seconds: float


@shows_progress
def reproduce(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Shown = None,
) -> Reproduction:
    """Merge the recipe in the lock file of `folder` again, with the inputs it names, and compare every hash.

    The copy is kept in `out`, where `force` replaces what is there; otherwise it is written beside the folder and
    removed.
    """
    progress = callback(progress)
    start = time.perf_counter()
    require_types(folder=(folder, str, os.PathLike))
    require_shared_types(out=out, threads=threads, force=force, progress=progress)
    if out is not None and is_url(out):
        raise RequestError("Making a model again: out is an address. Name a folder.", keys=("out",))
    name = usable_url(folder, "making again") if is_url(folder) else str(Path(folder).expanduser())
    folder = Path(name)
    lock = read_lock(name)
    workers = thread_count(threads)
    inputs = changed_data(lock) or changed_inputs(lock, workers, progress)
    result = Reproduction(name, "inputs changed", inputs, [], lock.sha256, None, None, _notes(lock), 0.0)
    if not inputs:
        with _place(folder, out) as place, _as_many_threads(lock):
            _merge_again(lock, place, keep=out is not None, threads=threads, force=force, progress=progress)
            again = open_checkpoint(place)
            hashes = hash_tensors(again, threads=workers, tensor_hash=lock.tensor_hash, progress=progress)
            result.differences = differences(lock, locked_tensors(again.tensors, hashes), place)
        result.sha256 = tensors_digest(hashes)
        result.verdict = "different" if result.differences else "identical"
        result.out = str(out) if out is not None else None
    result.seconds = time.perf_counter() - start
    return result


def _merge_again(
    lock: Lock, place: Path, *, keep: bool, threads: int | None, force: bool, progress: Progress | None
) -> None:
    """The recipe of the lock, with its options and the inputs it names, into `place`."""
    options = lock.options
    text = f"{lock.recipe}\n"  # a single line without its end would be taken for the path of a recipe
    merged = merge_recipe(
        text, models=pinned_inputs(lock), device=options.get("device", "cpu"), threads=threads, progress=progress
    )
    merged.save(
        place, shard_size=options.get("shard_size", "5GB"), out_dtype=options.get("out_dtype"), force=force, lock=keep,
        report=keep, copy_tokenizer=options.get("copy_tokenizer", True),
    )  # fmt: skip


def changed_inputs(lock: Lock, threads: int, progress: Progress | None = None) -> list[dict[str, Any]]:
    """The inputs that are not as they were, with what changed. Headers first: no weight is read for a known answer."""
    opened: list[tuple[LockedInput, Checkpoint]] = []
    changes: list[dict[str, Any]] = []
    for entry in lock.inputs:
        try:
            checkpoint = open_locked(entry, lock.seed)
        except CheckpointError as error:
            changes.append({"reference": entry.source, "changed": [str(error)]})
            continue
        opened.append((entry, checkpoint))
        problems = _header_changes(entry, checkpoint)
        if problems:
            changes.append({"reference": entry.source, "changed": problems})
    if changes:
        return changes
    for entry, checkpoint in opened:
        hashes = hash_tensors(
            checkpoint, entry.tensors, threads=threads, tensor_hash=lock.tensor_hash, progress=progress
        )
        changed = [name for name in hashes if hashes[name] != entry.tensors[name].hash]
        if changed:
            changes.append({"reference": entry.source, "changed": [f"changed tensors: {name_some(changed, 20)}"]})
    return changes


def changed_data(lock: Lock) -> list[dict[str, Any]]:
    """The data that is not there any more, or not what the models were run on."""
    changes = []
    for entry in lock.options.get("data", ()):
        problem = _data_change(entry)
        if problem is not None:
            changes.append({"reference": f"data {entry['name']}", "changed": [problem]})
    return changes


def _data_change(entry: Mapping[str, Any]) -> str | None:
    if entry["path"] is None:
        return "it was given to Python as an object, so there is no file to run the models on again"
    try:
        data = open_data(entry["path"], **entry["open"])
    except IsomergeError as error:
        return str(error)
    except TypeError as error:
        return f"the lock names a way to open it that there is not ({error})"
    if data.sha256 != entry["sha256"]:
        return f"its content has changed: sha256 {data.sha256}, and the models were run on {entry['sha256']}"
    return None


@contextmanager
def _as_many_threads(lock: Lock) -> Iterator[None]:
    """Run models over data in as many threads as then: sums of activations are rounded in another order otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(lock.options.get("torch_threads", before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_locked(entry: LockedInput, seed: int = 0) -> Checkpoint:
    """An input again, with the tensors that its hashes are of."""
    opened = _open_again(entry, seed)
    return opened.parts()[0] if entry.kind == STORED else opened


def _open_again(entry: LockedInput, seed: int) -> Checkpoint:
    """A hub model at the commit that was merged, whatever its branch has become."""
    if entry.kind == "fresh":
        return fresh_student(entry.source, seed)
    if entry.kind == KIND:
        return open_diffusion_adapter(Path(entry.source)).checkpoint
    if entry.kind == "adapter":
        return open_adapter(entry.source, revision=entry.revision).checkpoint
    return open_checkpoint(entry.source, revision=entry.revision)


def pinned_inputs(lock: Lock) -> dict[str, Checkpoint]:
    """The hub models of a lock at their recorded commits, an adapter on top of its model."""
    parts: dict[str, list[LockedInput]] = {}
    for entry in lock.inputs:
        parts.setdefault(entry.reference, []).append(entry)
    pinned = {}
    for reference, entries in parts.items():
        if not any(entry.revision for entry in entries):
            continue
        pinned[reference] = _open_again(entries[0], lock.seed)
        for adapter in entries[1:]:
            pinned[reference] = apply_adapter(pinned[reference], open_locked(adapter), name=reference)
    return pinned


def _header_changes(entry: LockedInput, checkpoint: Checkpoint) -> list[str]:
    changes = []
    if entry.config_sha256 and config_sha256(checkpoint) != entry.config_sha256:
        changes.append("its config is not the one that was merged")
    missing = sorted(entry.tensors.keys() - checkpoint.tensors.keys())
    if missing:
        changes.append(f"missing tensors: {name_some(missing, 20)}")
    here = [name for name in entry.tensors if name in checkpoint.tensors]
    now = locked_tensors(checkpoint.tensors, {name: entry.tensors[name].hash for name in here})
    other = [name for name in here if now[name] != entry.tensors[name]]
    if other:
        changes.append(f"another shape or dtype: {name_some(other, 20)}")
    return changes


def _notes(lock: Lock) -> list[str]:
    here = run_versions()
    return [
        f"made with {name} {lock.versions[name]}, made again with {here[name]}: results may round differently"
        for name in sorted(here.keys() & lock.versions.keys())
        if here[name] != lock.versions[name]
    ]


@contextmanager
def _place(folder: Path, out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Where to write: the folder that was named, or one on the same disk that goes away."""
    if out is not None:
        yield Path(out).expanduser()
        return
    absolute = folder.resolve()
    parent = tempfile.gettempdir() if is_url(folder) else absolute.parent
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{absolute.name}-again-", dir=parent))
    except OSError as error:
        raise RequestError(
            f"While preparing to make {folder} again: {parent} cannot be written to "
            f"({error.strerror or error}). Name a folder elsewhere.",
            keys=("out",),
        ) from error
    try:
        yield beside / absolute.name
    finally:
        shutil.rmtree(beside, ignore_errors=True)
