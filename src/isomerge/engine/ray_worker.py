"""What a Ray worker does: check that it is like its driver, unpickle the function once, call it for one unit."""

from __future__ import annotations

import os
import platform
import socket
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from isomerge import __version__
from isomerge.errors import CheckpointError, RequestError


@dataclass(frozen=True)
class Caller:
    """What a worker has to have in common with its driver."""

    versions: Mapping[str, str]
    visible: list[str]
    """Folders that it has to see."""
    folder: str
    """Where the driver runs: paths may be relative to it."""


@dataclass(frozen=True)
class Answer:
    """A result, or the error instead of it."""

    result: Any = None
    error: Exception | None = None
    trace: str = ""
    warnings: list[tuple[str, type[Warning]]] = field(default_factory=list)


_known: tuple[Any, Callable[[Any], Any]] | None = None
"""The function that this worker was sent last, by its reference."""


def installed_versions(isomerge: str) -> dict[str, str]:
    """What computes, as `isomerge.checkpoint.lock.current_versions`, without loading torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"isomerge": isomerge, "torch": torch, "Python": platform.python_version()}


def perform(caller: Caller, work: Any, unit: Any) -> Answer:
    """The answer for one unit. Errors are part of it: Ray would retry or rename them."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result, error, trace = _function(caller, work)(unit), None, ""
        except Exception as failed:
            result, error, trace = None, _sendable(failed), traceback.format_exc()
    told = [(str(one.message), one.category) for one in warned]
    return Answer(result, error, trace, told)


def _function(caller: Caller, work: Any) -> Callable[[Any], Any]:
    global _known
    if _known is None or _known[0] != work:
        _known = None  # let go of the last before the next is made
        _require_alike(caller)
        import ray
        import torch
        from ray import cloudpickle

        from isomerge.system import keep_freed_memory

        torch.set_num_threads(1)  # as every worker thread has: a sum over several is rounded in another order
        keep_freed_memory()
        _known = work, cloudpickle.loads(ray.get(work))
    return _known[1]


def _require_alike(caller: Caller) -> None:
    node, own = socket.gethostname(), installed_versions(__version__)
    for name, wanted in caller.versions.items():
        if own[name] != wanted:
            raise RequestError(
                f"Computing on Ray: node {node} has {name} {own[name]}, and the driver has {wanted}; another version "
                f"may round differently. Install the same {name} everywhere.",
                keys=("engine",),
            )
    if os.path.isdir(caller.folder):
        os.chdir(caller.folder)
    for path in caller.visible:
        if not os.path.exists(path):
            raise CheckpointError(
                f"Computing on Ray: node {node} does not see {path}. Workers read and write files themselves, so keep "
                "the models and the output on storage that every node mounts at the same path."
            )


def _sendable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else its text."""
    import pickle

    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
