"""Units in parallel, one BLAS thread inside each: the same bytes whatever the number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@contextmanager
def parallel(threads: int | None = None) -> Iterator[Run]:
    """A function that maps over a sequence in order; results never depend on how many threads there are.

    >>> with parallel(2) as run:
    ...     run(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]
    """
    count = max(1, threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads or 1)
    before = torch.get_num_threads()
    # A reduction split over several BLAS threads rounds differently for each number of threads.
    torch.set_num_threads(1)
    try:
        if count == 1:
            yield lambda function, items: [function(item) for item in items]
            return
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def run(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
                futures = [pool.submit(function, item) for item in items]
                try:
                    return [future.result() for future in futures]
                except BaseException:
                    for future in futures:  # an interrupt must not wait for everything still queued
                        future.cancel()
                    raise

            yield run
    finally:
        torch.set_num_threads(before)
