"""Run a merge: every worker reads, merges, hashes and writes one tensor after the other, a block at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomerge.checkpoint import CastReport, TensorInfo, cast
from isomerge.checkpoint.checks import require_finite_values
from isomerge.checkpoint.hashing import TENSOR_HASH, TENSOR_HASHES, raw_bytes
from isomerge.checkpoint.staged_tensors import TensorSink
from isomerge.checkpoint.writer import CheckpointWriter
from isomerge.engine import Engine, Threads
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.methods import Method
from isomerge.merging.regression import one_shortage_warning
from isomerge.merging.run.layer_scales import LayerScales
from isomerge.merging.run.rows import FirstRows, TensorGroup, TensorSource, spans
from isomerge.merging.run.sources import InputHashes, Stored


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
    longest: TensorSource | None = None
    """Of tables of different length, which `sources` hold as far as all go: the one whose other rows follow."""
    layer_scales: LayerScales | None = None
    """By how much each model's change is scaled before it is merged."""

    @property
    def merged_shape(self) -> tuple[int, ...]:
        """What all models have: of tables of different length, less than is written."""
        return self.info.shape if self.longest is None else self.sources[0].info.shape

    @property
    def stored_sources(self) -> list[TensorSource]:
        """Where rows come from, the base's last."""
        return _unwrapped([*self.sources, *([self.base] if self.base is not None else [])])

    @property
    def every_source(self) -> list[TensorSource]:
        """The same, and what options name beside the models."""
        return self.stored_sources + _unwrapped([one for sources in self.option_tensors.values() for one in sources])

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The merged rows block by block in the computing dtype, each with the index of its first element."""
        if self.method is None:
            yield from self._copied()
            return
        group = TensorGroup(
            self.name, self.sources, self.base, option_tensors=self.option_tensors, seed=self.seed, device=self.device,
            scales=self.layer_scales.of(self.name) if self.layer_scales is not None else (),
        )  # fmt: skip
        try:
            combine = self.method(group, **self.options)
            for block in group.blocks():
                yield block.start, combine(block)
            yield from self._beyond()
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
            rows = source.rows(start, stop)
            if isinstance(source, Stored) and rows.is_floating_point() and not math.isfinite(rows.sum()):
                require_finite_values(source.label, rows)
            yield first, rows

    def _beyond(self) -> Iterator[tuple[int, Tensor]]:
        """The rows that only the longest table has, or some of them."""
        if self.longest is None:
            return
        common = self.merged_shape[0]
        if len(self.info.shape) < 2:
            yield common, self.longest.rows(0, 1)[common:]
            return
        row = math.prod(self.info.shape[1:])
        for start, stop, _ in spans(self.info.shape):
            if stop > common:
                first = max(start, common)
                yield first * row, self.longest.rows(first, stop)

    def rounded(self, piece: Tensor) -> tuple[Tensor, CastReport]:
        """The piece in the written dtype. Finite inputs can still leave it; such a model would load and be garbage."""
        result, report = cast(piece, self.info.dtype)
        if not report.finite:
            wrong = int((~result.isfinite()).sum())
            dtype = str(self.info.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"While merging tensor '{self.name}': {wrong} of {result.numel()} values are too large for {dtype} "
                "or no numbers at all. Choose smaller weights, or a wider dtype (bfloat16 or float32)."
            )
        return result, report

    def release(self) -> None:
        """Let go of what was computed for this tensor alone."""
        for source in self.stored_sources:
            if hasattr(source, "release"):
                source.release()

    def tensor(self) -> Tensor:
        """The whole result in the computing dtype."""
        try:
            parts = [piece.reshape(-1).cpu().clone() for _, piece in self.pieces()]
        finally:
            self.release()
        empty = torch.empty(0, dtype=self.info.dtype)
        return (torch.cat(parts) if parts else empty).reshape(self.info.shape)


def scaled_by_layer(jobs: Sequence[Job], device: str) -> list[Job]:
    """The same jobs, with every model's change scaled by what LARV makes of its layer."""
    matrices = {job.name: (job.sources, job.base) for job in jobs if job.base is not None and job.method is not None}
    scales = LayerScales(matrices, device)
    return [replace(job, layer_scales=scales) if job.name in matrices else job for job in jobs]


def _unwrapped(sources: Iterable[TensorSource]) -> list[TensorSource]:
    return [source.source if isinstance(source, FirstRows) else source for source in sources]


class Stopped(Exception):
    """Raised in a worker when another one has failed or the user has had enough."""


@dataclass(frozen=True)
class Made:
    """What is known of a tensor whose bytes are written. Of one made in another process: also what this one would have
    noticed itself."""

    digest: str | None
    lost: CastReport
    looked: Any
    untold: int = 0
    """Bytes that nobody was told of."""
    inputs: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Hashes of input tensors that were read from end to end, by the place of their checkpoint."""


@dataclass
class Maker:
    """Makes jobs by their place in the list: what is mapped over threads, or sent to other processes."""

    jobs: Sequence[Job]
    writer: TensorSink
    hashing: bool
    hashes: InputHashes
    look: Callable[[Job], Any]
    """Looks at a job once its last block has passed, before anything is let go of."""
    holding: Callable[[Job], AbstractContextManager[None]] = lambda _: nullcontext()
    tell: Callable[[int], None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Listed by the jobs, so that the list is the same one wherever they are sent.
        every = [source for job in self.jobs for source in job.every_source if isinstance(source, Stored)]
        self.checkpoints = list({id(source.checkpoint): source.checkpoint for source in every}.values())

    def __getstate__(self) -> dict[str, Any]:
        here = {"holding": lambda _: nullcontext(), "tell": None, "stopped": None}
        return {**self.__dict__, **here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "stopped": threading.Event()}

    def __call__(self, place: int) -> Made:
        job = self.jobs[place]
        with self.holding(job):
            if self.stopped.is_set():
                raise Stopped
            digest, lost, looked = self._make(job)
        if self.tell is not None:
            return Made(digest, lost, looked)
        return Made(digest, lost, looked, job.info.nbytes, self.hashes.hand_over(self.checkpoints))

    def _make(self, job: Job) -> tuple[str | None, CastReport, Any]:
        digest = TENSOR_HASHES[TENSOR_HASH]() if self.hashing else None
        report = CastReport()
        try:
            with self.writer.opened(job.name) as write:
                for first, piece in job.pieces():
                    if self.stopped.is_set():
                        raise Stopped
                    if piece.dtype.is_floating_point and job.info.dtype.is_floating_point:
                        piece, part = job.rounded(piece)
                        report += part
                    view = raw_bytes(piece)
                    write(first * job.info.dtype.itemsize, view)
                    if digest is not None:
                        digest.update(view)
                    if self.tell is not None:
                        self.tell(len(view))
            looked = self.look(job)
        finally:
            job.release()
        return digest.hexdigest() if digest else None, report, looked


def run(
    jobs: Sequence[Job],
    writer: CheckpointWriter,
    *,
    engine: Engine | None = None,
    threads: int | None = None,
    hashing: bool = True,
    hashes: InputHashes | None = None,
    progress: Callable[[int], None] | None = None,
    holding: Callable[[Job], AbstractContextManager[None]] = lambda _: nullcontext(),
    look: Callable[[Job], Any] = lambda _: None,
    looked: Callable[[str, Any], None] = lambda *_: None,
    memory: Callable[[Job], int] | None = None,
    visible: Iterable[Path] = (),
) -> None:
    """Compute and write every job that the writer has not finished already, each while `holding` its memory; what
    `look` returns is given to `looked` with the name of the tensor.

    The result depends neither on the engine, nor on the number of workers, nor on who takes which tensor: blocks have a
    fixed size, sums run in the order of the blocks, and random numbers are counted by element.
    """
    engine = engine or Threads()
    telling = threading.Lock()

    def tell(count: int) -> None:
        if progress:
            with telling:
                progress(count)

    done = set(writer.finished)
    tell(sum(job.info.nbytes for job in jobs if job.name in done))
    # The largest first, so that no worker starts the largest when the others have nothing left to do.
    waiting = sorted((job for job in jobs if job.name not in done), key=lambda job: -job.info.nbytes)
    maker = Maker(waiting, writer, hashing, hashes or InputHashes(), look, holding, tell)

    def finish(place: int, made: Made) -> None:
        name = waiting[place].name
        looked(name, made.looked)
        for model, found in made.inputs.items():
            maker.hashes.found(maker.checkpoints[model], found)
        tell(made.untold)
        writer.finish(name, made.digest, made.lost)

    with one_shortage_warning():
        engine.each(
            maker, range(len(waiting)), finish, threads=threads, stopped=maker.stopped,
            memory=None if memory is None else lambda place: memory(waiting[place]),
            visible=[*visible, writer.folder],
        )  # fmt: skip
