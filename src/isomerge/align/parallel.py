"""Units in parallel, one BLAS thread inside each: the same bytes whatever the number of threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@contextmanager
def parallel(threads: int | None = None) -> Iterator[Run]:
    """A function that maps over a sequence in order; results never depend on how many threads there are.

    >>> with parallel(2) as run:
    ...     run(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]
    """
    count = thread_count(threads)
    with workers(count) as pool:

        def run(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
            if count == 1 or len(items) < 2:
                return [function(item) for item in items]
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:  # an interrupt must not wait for everything still queued
                    future.cancel()
                raise

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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(function: Callable[[T], R], items: Iterable[T], threads: int | None = None) -> Iterator[R]:
    """Results in order, computed a few items ahead of whoever takes them: memory holds one per thread.

    >>> list(ahead(lambda x: x * x, [1, 2, 3], threads=2))
    [1, 4, 9]
    """
    count = thread_count(threads)
    waiting: deque[Future[R]] = deque()
    with workers(count) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
