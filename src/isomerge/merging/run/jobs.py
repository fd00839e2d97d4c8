"""Run a merge: every worker reads, merges, hashes and writes one tensor after the other, a block at a time."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import CastReport, TensorInfo, cast
from isomerge.checkpoint.hashing import raw_bytes
from isomerge.checkpoint.writer import CheckpointWriter
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.methods import Method
from isomerge.merging.regression import one_shortage_warning
from isomerge.merging.run.rows import TensorGroup, TensorSource, spans
from isomerge.threads import thread_count, workers


@dataclass(frozen=True)
class Job:
    """One output tensor: what it is made of and how."""

    name: str
    info: TensorInfo
    """Of the tensor that is written."""
    sources: Sequence[TensorSource]
    base: TensorSource | None
    method: Method | None
    """None: the rows of the only source as they are stored."""
    options: Mapping[str, Any] = field(default_factory=dict)
    option_tensors: Mapping[str, Sequence[TensorSource]] = field(default_factory=dict)
    """What options name beside the models, such as importances."""
    seed: int = 0
    device: str = "cpu"

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The merged rows block by block in the computing dtype, each with the index of its first element."""
        if self.method is None:
            yield from self._copied()
            return
        group = TensorGroup(
            self.name, self.sources, self.base, option_tensors=self.option_tensors, seed=self.seed, device=self.device
        )
        try:
            combine = self.method(group, **self.options)
            for block in group.blocks():
                yield block.start, combine(block)
        except RequestError as error:
            raise RequestError(f"Merging tensor '{self.name}': {error}") from error
        except RuntimeError as error:
            if not self._out_of_range(group.dtype):
                raise
            raise RequestError(f"Merging tensor '{self.name}': an option is too large for {group.dtype}.") from error

    def _out_of_range(self, dtype: torch.dtype) -> bool:
        """Whether options, or products of them, can be too large for the computing dtype."""
        values = [one for value in self.options.values() for one in (value if isinstance(value, list) else [value])]
        sizes = [abs(float(value)) for value in values if isinstance(value, (int, float))]
        return math.prod(max(1.0, size) for size in sizes) > torch.finfo(dtype).max

    def _copied(self) -> Iterator[tuple[int, Tensor]]:
        (source,) = self.sources
        for start, stop, first in spans(self.info.shape):
            yield first, source.rows(start, stop)

    def rounded(self, piece: Tensor) -> tuple[Tensor, CastReport]:
        """The piece in the written dtype. Finite inputs can still leave it; such a model would load and be garbage."""
        result, report = cast(piece, self.info.dtype)
        if not math.isfinite(float(result.sum(dtype=torch.float32))) and not bool(result.isfinite().all()):
            wrong = int((~result.isfinite()).sum())
            dtype = str(self.info.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"While merging tensor '{self.name}': {wrong} of {result.numel()} values are too large for {dtype} "
                "or no numbers at all. Choose smaller weights, or a wider dtype (bfloat16 or float32)."
            )
        return result, report

    def release(self) -> None:
        """Let go of what was computed for this tensor alone."""
        for source in [*self.sources, self.base]:
            if source is not None and hasattr(source, "release"):
                source.release()

    def tensor(self) -> Tensor:
        """The whole result in the computing dtype."""
        try:
            parts = [piece.reshape(-1).cpu().clone() for _, piece in self.pieces()]
        finally:
            self.release()
        empty = torch.empty(0, dtype=self.info.dtype)
        return (torch.cat(parts) if parts else empty).reshape(self.info.shape)


class Stopped(Exception):
    """Raised in a worker when another one has failed or the user has had enough."""


def run(
    jobs: Sequence[Job],
    writer: CheckpointWriter,
    *,
    threads: int | None = None,
    hashing: bool = True,
    progress: Callable[[int], None] | None = None,
    holding: Callable[[Job], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Compute and write every job that the writer has not finished already, each while `holding` its memory.

    The result depends neither on the number of threads nor on who takes which tensor: blocks have a fixed size, sums
    run in the order of the blocks, and random numbers are counted by element.
    """
    stop = threading.Event()
    telling = threading.Lock()

    def tell(count: int) -> None:
        if progress:
            with telling:
                progress(count)

    def work(job: Job) -> None:
        with holding(job):
            if not stop.is_set():
                make(job)

    def make(job: Job) -> None:
        digest = hashlib.sha256() if hashing else None
        report = CastReport()
        try:
            for first, piece in job.pieces():
                if stop.is_set():
                    raise Stopped
                if piece.dtype.is_floating_point and job.info.dtype.is_floating_point:
                    piece, part = job.rounded(piece)
                    report += part
                view = raw_bytes(piece)
                writer.write_bytes(job.name, first * job.info.dtype.itemsize, view)
                if digest is not None:
                    digest.update(view)
                tell(len(view))
        finally:
            job.release()
        writer.finish(job.name, digest.hexdigest() if digest else None, report)

    done = set(writer.finished)
    tell(sum(job.info.nbytes for job in jobs if job.name in done))
    # The largest first, so that no worker starts the largest when the others have nothing left to do.
    waiting = sorted((job for job in jobs if job.name not in done), key=lambda job: -job.info.nbytes)
    with one_shortage_warning(), workers(thread_count(threads)) as pool:
        futures = [pool.submit(work, job) for job in waiting]
        try:
            _first_failure(futures)
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


def _first_failure(futures: list[Future[None]]) -> None:
    """Wait for all; raise what went wrong first, as soon as it does."""
    finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in finished:
        future.result()
