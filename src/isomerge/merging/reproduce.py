"""Rebuild a merged model from its lock file and compare every hash."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isomerge.checkpoint.lock import Lock
from isomerge.evaluation.reproduce import pinned_inputs
from isomerge.evaluation.reproduce import reproduce as rebuild
from isomerge.merging.api import merge_recipe
from isomerge.results import Result


@dataclass
class Reproduction(Result):
    """What came of it: `verdict` is "identical", "different" or "inputs changed"."""

    folder: str
    verdict: str
    inputs: list[dict[str, Any]]
    differences: list[Any]
    expected_sha256: str
    sha256: str | None
    out: str | None
    notes: list[str]
    seconds: float


def reproduce(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Reproduction:
    """Rebuild `folder` from the recipe and inputs in its lock file, and compare every hash.

    `folder` is not changed. The copy is removed again unless `out` names a folder for it; `force` lets it replace what
    is there. With "different", `differences` lists the tensors and files; with "inputs changed", `inputs` says which
    and how, and nothing is run.

    >>> written = isomerge.merge(["model-a", "model-b"]).save("merged-to-reproduce")
    >>> isomerge.reproduce("merged-to-reproduce").verdict
    'identical'
    """

    def rerun(lock: Lock, place: Path) -> Any:
        merged = merge_recipe(
            lock.recipe, models=pinned_inputs(lock), device=lock.options.get("device", "cpu"), threads=threads,
            progress=progress,
        )  # fmt: skip
        return merged.save(
            place, shard_size=lock.options.get("shard_size", "5GB"), out_dtype=lock.options.get("out_dtype"),
            force=force, lock=out is not None, report=out is not None,
        )  # fmt: skip

    return Reproduction(**rebuild(folder, rerun, out=out, threads=threads, progress=progress))
