"""The workers of a Ray cluster. Ray places the units, retries those of a worker that died, and holds what is sent.

The function is sent once, as the driver pickled it; a worker unpickles it once and then is sent units only. Nothing
else is kept there: the folders that the function reads and writes are storage that all machines share.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isomerge import __version__
from isomerge.engine.engines import Unit
from isomerge.engine.ray_connection import connect
from isomerge.engine.ray_worker import Answer, installed_versions
from isomerge.errors import IsomergeError, RequestError
from isomerge.threads import Run

RETRIES = 3
"""How often a unit is computed again after its worker died."""
AHEAD = 2
"""Units in Ray's hands for each processor of the cluster: one to compute and one to follow it."""
MEMORY_STEP = 2**28
"""Ray keeps workers ready for each request of resources, so requests that differ little are made equal."""


class RemoteFailure(Exception):
    """The traceback of an error as the worker printed it: the cause of the same error here."""


class RayCluster:
    """The cluster at an address, or a local one that is started for this process."""

    name = "ray"

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self._sent: tuple[Any, Any] | None = None
        connect(address)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sent": None}

    def each(
        self,
        function: Callable[[Unit], Any],
        units: Sequence[Unit],
        done: Callable[[int, Any], None],
        *,
        threads: int | None = None,
        stopped: threading.Event | None = None,
        memory: Callable[[Unit], int] | None = None,
        visible: Iterable[Path] = (),
    ) -> None:
        """As `Engine.each`; `threads` is how many units are computed at once on all machines together."""
        ray = connect(self.address)
        from ray import cloudpickle

        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_entry())
        if self._sent is None or self._sent[0] is not function:
            self._sent = function, ray.put(cloudpickle.dumps(function))  # type: ignore[no-untyped-call]
        work = self._sent[1]
        paths = [str(path.absolute()) for path in visible]
        caller = {"versions": installed_versions(__version__), "visible": paths, "folder": os.getcwd()}
        most = threads or AHEAD * _processors(ray)
        roomiest = _roomiest(ray)
        left = iter(range(len(units)))
        running: dict[Any, int] = {}
        try:
            while True:
                while len(running) < most and (place := next(left, None)) is not None:
                    unit = units[place]
                    asked = {} if memory is None else {"memory": _rounded(memory(unit), roomiest)}
                    running[task.options(name="isomerge", **asked).remote(caller, [work], unit)] = place
                if not running:
                    return
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    answer = _answer(ray, reference)
                    done(running.pop(reference), answer)
        except BaseException:
            if stopped is not None:
                stopped.set()
            # The few units in Ray's hands end with this process, or by themselves: ray.cancel of a unit that is just
            # being completed ends the driver by a failed check (Ray 2.60).
            raise

    @contextmanager
    def parallel(self, threads: int | None = None, *, visible: Iterable[Path] = ()) -> Iterator[Run]:
        paths = list(visible)

        def run(
            function: Callable[[Any], Any], items: Sequence[Any], done: Callable[[int], None] | None = None
        ) -> list[Any]:
            results: list[Any] = [None] * len(items)

            def keep(place: int, result: Any) -> None:
                results[place] = result
                if done is not None:
                    done(place)

            self.each(function, items, keep, threads=threads, visible=paths)
            return results

        yield run


def _entry() -> Callable[[dict[str, Any], list[Any], Unit], Any]:
    """What Ray calls in a worker. It is sent as code and not as a name, so that a worker with another isomerge, or
    with none, can say so."""

    def entry(caller: dict[str, Any], work: list[Any], unit: Any) -> Any:
        try:
            from isomerge.engine.ray_worker import Caller, perform
        except ImportError as error:
            import socket

            return None, f"{socket.gethostname()}: {error}"
        return perform(Caller(**caller), work[0], unit)

    return entry


def _answer(ray: Any, reference: Any) -> Any:
    """The result of a unit; an error of the worker is raised as it was raised there."""
    try:
        answer = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise _ray_failure(error) from error
    if not isinstance(answer, Answer):
        raise RequestError(
            f"Computing on Ray: a worker cannot import isomerge ({answer[1]}). Install isomerge {__version__} in the "
            "environment of every worker.",
            keys=("engine",),
        )
    for text, category in answer.warnings:
        warnings.warn(text, category, stacklevel=2)
    if answer.error is not None:
        raise answer.error from (RemoteFailure(answer.trace) if answer.trace else None)
    return answer.result


def _ray_failure(error: Exception) -> IsomergeError:
    told = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return IsomergeError(
        f"Computing on Ray: a worker died, also when its unit was tried again ({type(error).__name__}: {told}). "
        "If a machine ran out of memory, lower threads; then run the same command again, which goes on from here."
    )


def _processors(ray: Any) -> int:
    found = int(ray.cluster_resources().get("CPU", 0))
    if not found:
        raise RequestError(
            "Computing on Ray: the cluster has no processor for workers. Start a node with 'ray start'.",
            keys=("address",),
        )
    return found


def _roomiest(ray: Any) -> int:
    """The memory of the largest node: what needs more gets a node of its own instead of waiting for ever."""
    return int(max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0))


def _rounded(count: int, most: int) -> int:
    return min(-(-count // MEMORY_STEP) * MEMORY_STEP, most)
