"""Units in parallel, one BLAS thread inside each: the same bytes whatever the number of threads.

Small operations take turns on Python's lock, and sixteen threads of them are slower than one. So work begins with one
thread, and while it is not done their number doubles: short work stays with few, long work soon has all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from isomerge import system

T = TypeVar("T")
R = TypeVar("R")
DOUBLING = 0.015
"""Seconds after which twice as many threads work."""


class Run(Protocol):
    """Maps a function over items, in order; `done` is told the place of each when its result is there."""

    def __call__(
        self, function: Callable[[Any], Any], items: Sequence[Any], done: Callable[[int], None] | None = None
    ) -> list[Any]: ...


@contextmanager
def parallel(threads: int | None = None) -> Iterator[Run]:
    """A function that maps over a sequence in order; results never depend on how many threads there are.

    >>> with parallel(2) as run:
    ...     run(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]
    """
    count = thread_count(threads)
    with workers(count) as pool:

        def run(
            function: Callable[[Any], Any], items: Sequence[Any], done: Callable[[int], None] | None = None
        ) -> list[Any]:
            results: list[Any] = [None] * len(items)

            def one(place: int) -> None:
                results[place] = function(items[place])
                if done is not None:
                    done(place)

            if count == 1 or len(items) < 2:
                for place in range(len(items)):
                    one(place)
                return results
            errors: dict[int, BaseException] = {}
            left = iter(range(len(items)))  # shared: whoever is free takes the next one
            stopped = threading.Event()

            def work() -> None:
                while not stopped.is_set():
                    place = next(left, None)
                    if place is None:
                        return
                    try:
                        one(place)
                    except BaseException as error:
                        errors[place] = error
                        stopped.set()

            futures: list[Future[None]] = []
            try:
                while len(futures) < min(count, len(items)):
                    futures += [pool.submit(work) for _ in range(max(1, min(len(futures), count - len(futures))))]
                    if not wait(futures, DOUBLING).not_done:
                        break
                wait(futures)
            finally:
                stopped.set()  # an interrupt must not wait for everything that is left
            if errors:  # of several the first one, whoever met it: all before it were begun before it
                raise errors[min(errors)]
            return results

        yield run


@contextmanager
def workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool with one BLAS thread per worker: a reduction split over several rounds differently for each number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def thread_count(threads: int | None) -> int:
    """As many as asked for, else as many as this process may use."""
    if threads:
        return max(1, threads)
    return system.processors()


def ahead(function: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """Results in order, computed a few items ahead of whoever takes them: memory holds one per thread.

    >>> list(ahead(lambda x: x * x, [1, 2, 3], threads=2))
    [1, 4, 9]
    """
    count = thread_count(threads)
    waiting: deque[Future[R]] = deque()
    with workers(count) as pool:
        start = time.monotonic()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                doublings = min(30, int((time.monotonic() - start) / DOUBLING))
                while len(waiting) > min(count, 2**doublings):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
