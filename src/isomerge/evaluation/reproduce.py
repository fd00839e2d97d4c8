"""`reproduce`: make a model again from its lock file, and compare every hash."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from isomerge.adapters import apply_adapter, open_adapter
from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.checkpoint.lock import Lock, LockedInput, config_sha256, current_versions, locked_tensors, read_lock
from isomerge.checkpoint.open import open_checkpoint
from isomerge.data import open_data
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from isomerge.evaluation.verify import differences

Rerun = Callable[[Lock, Path], Any]
"""`rerun(lock, out)` merges the recipe of the lock, with its seed and options and the inputs it names, into `out`."""
Progress = Callable[[int, int, str], None]


def reproduce(
    folder: str | os.PathLike[str],
    rerun: Rerun,
    *,
    out: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Re-create `folder` from its lock: in `out`, or beside it in a folder that is removed again.

    The record has `verdict`: "identical"; "different", with `differences`; or "inputs changed", with what changed in
    `inputs`, and then nothing is run.
    """
    start = time.perf_counter()
    folder = Path(folder).expanduser()
    lock = read_lock(folder)
    workers = threads or os.cpu_count() or 1
    record: dict[str, Any] = {
        "folder": str(folder), "verdict": "inputs changed",
        "inputs": changed_data(lock) or changed_inputs(lock, workers, progress),
        "differences": [], "expected_sha256": lock.sha256, "sha256": None, "out": None, "notes": _notes(lock),
    }  # fmt: skip
    if not record["inputs"]:
        with _place(folder, out) as place, _as_many_threads(lock):
            rerun(lock, place)
            again = open_checkpoint(place)
            hashes = hash_tensors(again, threads=workers, progress=progress)
            record["differences"] = differences(lock, locked_tensors(again.tensors, hashes), place)
        record["sha256"] = tensors_digest(hashes)
        record["verdict"] = "different" if record["differences"] else "identical"
        record["out"] = str(out) if out is not None else None
    return {**record, "seconds": time.perf_counter() - start}


def changed_inputs(lock: Lock, threads: int, progress: Progress | None = None) -> list[dict[str, Any]]:
    """The inputs that are not as they were, with what changed. Headers first: no weight is read for a known answer."""
    opened: list[tuple[LockedInput, Checkpoint]] = []
    found: list[dict[str, Any]] = []
    for entry in lock.inputs:
        try:
            checkpoint = open_locked(entry)
        except CheckpointError as error:
            found.append({"reference": entry.source, "changed": [str(error)]})
            continue
        opened.append((entry, checkpoint))
        problems = _header_changes(entry, checkpoint)
        if problems:
            found.append({"reference": entry.source, "changed": problems})
    if found:
        return found
    for entry, checkpoint in opened:
        hashes = hash_tensors(checkpoint, entry.tensors, threads=threads, progress=progress)
        changed = [name for name in hashes if hashes[name] != entry.tensors[name].sha256]
        if changed:
            found.append({"reference": entry.source, "changed": [f"changed tensors: {name_some(changed, 20)}"]})
    return found


def changed_data(lock: Lock) -> list[dict[str, Any]]:
    """The data that is not there any more, or not what the models were run on."""
    found = []
    for entry in lock.options.get("data", ()):
        problem = _data_change(entry)
        if problem is not None:
            found.append({"reference": f"data {entry['name']}", "changed": [problem]})
    return found


def _data_change(entry: Mapping[str, Any]) -> str | None:
    if entry["path"] is None:
        return "it was given to Python as an object, so there is no file to run the models on again"
    try:
        data = open_data(entry["path"], **entry["open"])
    except IsomergeError as error:
        return str(error)
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


def open_locked(entry: LockedInput) -> Checkpoint:
    """An input again, a hub model at the commit that was merged, whatever its branch has become."""
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
        pinned[reference] = open_locked(entries[0])
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
    now = locked_tensors(checkpoint.tensors, {name: entry.tensors[name].sha256 for name in here})
    other = [name for name in here if now[name] != entry.tensors[name]]
    if other:
        changes.append(f"another shape or dtype: {name_some(other, 20)}")
    return changes


def run_versions() -> dict[str, str]:
    """What computes when models are run: their stock classes too."""
    try:
        return {**current_versions(), "transformers": version("transformers")}
    except PackageNotFoundError:
        return current_versions()


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
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{absolute.name}-again-", dir=absolute.parent))
    except OSError as error:
        raise RequestError(
            f"While preparing to make {folder} again: {absolute.parent} cannot be written to "
            f"({error.strerror or error}). Name a folder elsewhere with -o."
        ) from error
    try:
        yield beside / absolute.name
    finally:
        shutil.rmtree(beside, ignore_errors=True)
