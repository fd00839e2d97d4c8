"""One model's vocabulary table in the output's vocabulary, row by row from where each row comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from isomerge.checkpoint.base import TensorInfo
from isomerge.merging.run.rows import BLOCK_ELEMENTS, TensorSource

# Rows this near to each other are read together: a few needless rows cost less than another read.
NEAR_ELEMENTS = 2**14

Reader = Callable[[TensorSource, Tensor], Tensor]
"""Some rows of a source by their numbers, vocabulary first."""


class VocabularyTable:
    """Behaves as a stored tensor of the output's shape; nothing is read before its rows are asked for."""

    def __init__(
        self, sources: Sequence[TensorSource], own: int, rows: Tensor, others: Tensor, blank: Tensor, *, axis: int = 0
    ) -> None:
        """`own` is the model's place among the sources, `axis` where the vocabulary lies.

        `rows` (size,) is the model's own row for each output row, −1 where it has none to give. There `others`
        (sources, size) says which row each source gives, −1 for none: one giver is copied, several are averaged, none
        means zeros. `blank` (size,) marks rows without a token, which get the mean of all others. The three are shared
        between the tables of a merge and never written to.
        """
        self._sources, self._own, self._axis = list(sources), own, axis
        self._rows, self._others, self._blank = rows, others, blank
        stored = self._sources[own].info
        shape = list(stored.shape)
        shape[axis] = len(rows)
        self.info = TensorInfo(tuple(shape), stored.dtype)
        self.label = getattr(self._sources[own], "label", "a vocabulary table")
        self._row_elements = max(1, math.prod(shape) // max(1, shape[axis]))

    def rows(self, start: int, stop: int) -> Tensor:
        if self._axis == 0 and len(self.info.shape) > 1:
            rows = self._gather(start, stop, self._read_scattered)
            blank = self._blank[start:stop]
            if blank.any():
                rows = _widened(rows)
                rows[blank] = self._mean.to(rows.dtype)
            return rows

        # The vocabulary is not the axis that is cut into blocks, or the tensor is a vector: every entry is there.
        def read(source: TensorSource, ids: Tensor) -> Tensor:
            return source.rows(start, stop).movedim(self._axis, 0)[ids]

        rows = self._gather(0, len(self._rows), read)
        if self._blank.any():
            rows = _widened(rows)
            rows[self._blank] = rows[~self._blank].double().mean(0).to(rows.dtype)
        return rows.movedim(0, self._axis)

    def release(self) -> None:
        """Let go of what the sources computed."""
        for source in self._sources:
            if hasattr(source, "release"):
                source.release()

    def _gather(self, start: int, stop: int, read: Reader) -> Tensor:
        take, own = self._others[:, start:stop].clone(), self._rows[start:stop]
        has = own >= 0
        take[:, has] = -1
        take[self._own, has] = own[has]
        givers = (take >= 0).sum(0)
        dtype = self.info.dtype
        for source, wanted in zip(self._sources, take, strict=True):
            if source.info.dtype != dtype and bool((wanted >= 0).any()):
                dtype = torch.promote_types(dtype, source.info.dtype)
        if bool((givers > 1).any()):
            dtype = torch.promote_types(dtype, torch.float32)
        out: Tensor | None = None
        filled = torch.zeros(stop - start, dtype=torch.bool)
        for source, wanted in zip(self._sources, take, strict=True):
            places = (wanted >= 0).nonzero().flatten()
            if not len(places):
                continue
            rows = read(source, wanted[places])
            if rows.dtype != dtype:  # a source may hand out more than it stores
                dtype = torch.promote_types(dtype, rows.dtype)
                out = out.to(dtype) if out is not None else None
            if out is None:
                out = torch.zeros((stop - start, *rows.shape[1:]), dtype=dtype)
            first = ~filled[places]
            out[places[first]] = rows[first].to(dtype)  # copied, not added to zero, which would lose the sign of −0
            out[places[~first]] += rows[~first].to(dtype)
            filled[places] = True
        if out is None:
            out = torch.zeros((stop - start, *self._row_shape), dtype=dtype)
        shared = givers > 1
        out[shared] /= givers[shared].reshape(-1, *[1] * (out.dim() - 1))
        return out

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return self.info.shape[: self._axis] + self.info.shape[self._axis + 1 :]

    def _read_scattered(self, source: TensorSource, ids: Tensor) -> Tensor:
        ordered, places = ids.sort()
        near = max(1, NEAR_ELEMENTS // self._row_elements)
        most = max(1, BLOCK_ELEMENTS // self._row_elements)
        pieces = []
        for first, last in runs(ordered.tolist(), near, most):
            wanted = ordered[first:last]
            begin, end = int(wanted[0]), int(wanted[-1]) + 1
            pieces.append(source.rows(begin, end)[wanted - begin])  # indexing copies, before the next read
        rows = torch.cat(pieces)
        return torch.empty_like(rows).index_copy_(0, places, rows)

    @cached_property
    def _mean(self) -> Tensor:
        """Of all rows that have a token: what padding is filled with, so that it is an unremarkable row."""
        step = max(1, BLOCK_ELEMENTS // self._row_elements)
        size = len(self._rows)
        total = torch.zeros(self._row_shape, dtype=torch.float64)
        for start in range(0, size, step):
            stop = min(start + step, size)
            rows = self._gather(start, stop, self._read_scattered)
            total += rows[~self._blank[start:stop]].double().sum(0)
        return total / int((~self._blank).sum())


def runs(ids: Sequence[int], near: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut sorted numbers into stretches [first, last) to be read in one go each: neighbours at most `near` apart, and
    not more than `most` rows from the first to the last.

    >>> list(runs([3, 4, 6, 40, 41], near=2, most=100))
    [(0, 3), (3, 5)]
    """
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] - ids[i - 1] > near or ids[i] - ids[first] >= most:
            yield first, i
            first = i


def _widened(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
