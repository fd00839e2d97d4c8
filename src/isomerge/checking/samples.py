"""The same values of several models, tensor by tensor: spread over each tensor, few enough to read in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.checkpoint import Checkpoint, is_harmless_buffer

MOST_VALUES = 24_000_000  # of one model in all: whatever its size, a check takes seconds
MOST_OF_ONE, LEAST_OF_ONE = 1 << 18, 1 << 11
PIECES = 8  # a tensor is looked at in so many places


@dataclass(frozen=True)
class Sample:
    """Values of one tensor, model by model; every value stands for `scale` of them."""

    name: str
    matrix: bool
    """Not a vector: gains near one and biases near zero say little about who descends from whom."""
    values: list[Tensor]
    scale: float
    same: list[bool]
    """Which models have, in every sampled bit, what the first has."""
    bad: list[int]
    """How many values of each model are NaN or infinite; they count as zero."""


def shared_tensors(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The weights that all have, in one shape but perhaps with tables of different lengths."""
    return [
        name
        for name, info in checkpoints[0].tensors.items()
        if not is_harmless_buffer(name) and all(_comparable(info.shape, name, c) for c in checkpoints)
    ]


def _comparable(shape: tuple[int, ...], name: str, other: Checkpoint) -> bool:
    info = other.tensors.get(name)
    return (
        info is not None
        and info.dtype.is_floating_point
        and info.dtype.itemsize > 1
        and len(info.shape) == len(shape)
        and info.shape[1:] == shape[1:]
    )


def samples(checkpoints: Sequence[Checkpoint]) -> Iterator[Sample]:
    """One sample of every shared tensor."""
    names = shared_tensors(checkpoints)
    most = max(LEAST_OF_ONE, min(MOST_OF_ONE, MOST_VALUES // max(1, len(names))))
    for name in names:
        shapes = [c.tensors[name].shape for c in checkpoints]
        count = min(math.prod(shape) for shape in shapes)
        if count:
            yield _sample(checkpoints, name, spans(count, most), count, len(shapes[0]) > 1)


def spans(count: int, most: int) -> list[tuple[int, int]]:
    """Places to look at among `count` values: all of them, or some pieces spread evenly.

    >>> spans(100, 1000), spans(1000, 16)[:2]
    ([(0, 100)], [(0, 2), (142, 144)])
    """
    if count <= most:
        return [(0, count)]
    length = max(1, most // PIECES)
    return [(start, start + length) for start in (k * (count - length) // (PIECES - 1) for k in range(PIECES))]


def _sample(
    checkpoints: Sequence[Checkpoint], name: str, places: list[tuple[int, int]], count: int, matrix: bool
) -> Sample:
    stored = [torch.cat([c.read_span(name, start, stop) for start, stop in places]) for c in checkpoints]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in stored) else torch.float32
    same = [t.dtype == stored[0].dtype and torch.equal(t, stored[0]) for t in stored]
    values, bad = [], []
    for tensor in stored:
        number = tensor.to(wide)
        broken = 0 if math.isfinite(float(number.sum())) else int((~number.isfinite()).sum())
        values.append(number.nan_to_num(0.0, 0.0, 0.0) if broken else number)
        bad.append(broken)
    return Sample(name, matrix, values, count / len(values[0]), same, bad)
