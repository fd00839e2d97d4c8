"""One interface for both engines: map a function over units of work, the same results wherever they are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from isomerge import choices
from isomerge.arguments import require_choice, require_types
from isomerge.errors import RequestError
from isomerge.threads import Run, parallel, thread_count, workers

Unit = Any
"""What one call of the function is given: a place in a list, a name. On a cluster it is pickled, as the function is."""


class Engine(Protocol):
    """Each unit is computed with one BLAS thread, and by whoever is free: only the function decides a result."""

    name: str

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
        """Call `done` with the place and the result of every unit, as soon as it is known and perhaps from a thread.

        The first error ends it all and is raised; `stopped` is set then, for functions that can stop midway. `memory`
        is what a unit takes, in bytes, and `visible` are the folders that every worker has to see.
        """
        ...

    def parallel(self, threads: int | None = None, *, visible: Iterable[Path] = ()) -> AbstractContextManager[Run]:
        """A function that maps over a sequence and gives the results in its order."""
        ...


class Threads:
    """Threads of this process, which share its memory."""

    name = "threads"

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
        def work(place: int) -> None:
            done(place, function(units[place]))

        with workers(thread_count(threads)) as pool:
            futures = [pool.submit(work, place) for place in range(len(units))]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                if stopped is not None:
                    stopped.set()
                for future in futures:
                    future.cancel()
                raise

    @contextmanager
    def parallel(self, threads: int | None = None, *, visible: Iterable[Path] = ()) -> Iterator[Run]:
        with parallel(threads) as run:
            yield run


def engine_of(engine: str | Engine, address: str | None = None) -> Engine:
    """The engine of this name, ready: a cluster that cannot be reached is an error before any work.

    >>> engine_of("threads").name
    'threads'
    """
    if not isinstance(engine, str) and hasattr(engine, "each"):
        return engine
    require_types(engine=(engine, str), address=(address, str, None))
    require_choice("engine", engine, choices.ENGINES)
    if engine == "threads":
        if address is not None:
            raise RequestError(
                "address names a Ray cluster, and engine is 'threads'. Set engine to 'ray', or leave address out.",
                keys=("address", "engine"),
            )
        return Threads()
    from isomerge.engine.ray_cluster import RayCluster  # Ray is imported only where it is used

    return RayCluster(address)


def require_threads(engine: Engine, act: str, cause: str) -> None:
    """Raise for work that only this process can do."""
    if engine.name != "threads":
        raise RequestError(
            f"{act} with engine '{engine.name}': {cause}. Leave engine out to compute in this process.",
            keys=("engine",),
        )
