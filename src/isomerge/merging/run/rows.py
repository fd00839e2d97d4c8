"""One output tensor's inputs: the same tensor of every model, read in blocks of rows and never whole unless asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from isomerge.checkpoint.base import TensorInfo
from isomerge.checkpoint.checks import require_finite_values

# Half a million elements: large enough that Python costs nothing, small enough that a few copies fit in the cache.
# Sums run block after block, so this number is part of what makes results the same on every machine.
BLOCK_ELEMENTS = 2**19


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows a tensor has, and how many elements a row; with fewer than two axes it is one row."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def spans(shape: tuple[int, ...], block_elements: int = BLOCK_ELEMENTS) -> Iterator[tuple[int, int, int]]:
    """(first row, row after the last, first element) of every block; an empty tensor has none.

    >>> list(spans((5, 10), block_elements=20))
    [(0, 2, 0), (2, 4, 20), (4, 5, 40)]
    """
    rows, row_elements = rows_of(shape)
    if rows and row_elements:
        step = max(1, block_elements // row_elements)
        for start in range(0, rows, step):
            yield start, min(start + step, rows), start * row_elements


class TensorSource(Protocol):
    """One model's tensor, wherever its rows come from."""

    @property
    def info(self) -> TensorInfo: ...

    @property
    def label(self) -> str:
        """What it is, for messages: "tensor 'x' of model-a"."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of axis 0, in the stored dtype or a wider one. A tensor of fewer than two axes is always
        asked for whole."""
        ...


@dataclass(frozen=True)
class GramSource:
    """What data showed of the inputs of one linear map: Σ x xᵀ, whose shape is not that of the weight."""

    count: int
    """How many samples."""
    transposed: bool
    """The weight is stored as (in, out)."""
    label: str
    read: Callable[[], Tensor]
    """Σ x xᵀ, when it is asked for."""
    read_total: Callable[[], Tensor]
    """Σ x"""
    other: TensorSource | None = None
    """Of a map whose bias is solved with its weight: the bias, or the weight where the tensor is the bias."""
    is_bias: bool = False
    """The tensor is the bias of the map, and `other` its weight."""

    @property
    def info(self) -> TensorInfo:
        return TensorInfo.of(self.read())

    def rows(self, start: int, stop: int) -> Tensor:
        return self.read()[start:stop]


class LowRankUpdate:
    """A matrix left @ right that is only formed in the rows that are asked for."""

    def __init__(self, left: Tensor, right: Tensor, label: str) -> None:
        self.left, self.right, self.label = left, right, label
        self.info = TensorInfo((left.shape[0], right.shape[1]), left.dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.left[start:stop] @ self.right


def gram_option(name: str) -> Callable[[Callable[..., Combine]], Callable[..., Combine]]:
    """Declare that an option of a method names files of Gram matrices (one per linear map, found by the weight's name)
    and not of tensors like the model's. The group has them under `grams`, with an empty list where the files have
    none for this tensor."""

    def declare(function: Callable[..., Combine]) -> Callable[..., Combine]:
        function.gram_options = (*gram_options(function), name)  # type: ignore[attr-defined]
        return function

    return declare


def gram_options(function: Callable[..., Combine]) -> tuple[str, ...]:
    return getattr(function, "gram_options", ())


@dataclass(frozen=True)
class RowBlock:
    """The same rows of every model, in the computing dtype: float32, or float64 where an input is."""

    start: int
    """The index of its first element in the flattened tensor."""
    tensors: Tensor
    """(models, rows, …): the models in the recipe's order, without the base."""
    base: Tensor | None
    """(rows, …)"""
    option_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """(sources, rows, …) of what a method asked for beside the models, such as their importances."""

    @cached_property
    def deltas(self) -> Tensor:
        """What each model added to the base: the task vectors. Without a base, the models themselves."""
        return self.tensors if self.base is None else self.tensors - self.base

    def like(self, values: Sequence[float]) -> Tensor:
        """One number per model, shaped to multiply `tensors`."""
        column = torch.tensor(values, dtype=self.tensors.dtype, device=self.tensors.device)
        return column.reshape(-1, *[1] * (self.tensors.dim() - 1))

    def onto_base(self, delta: Tensor) -> Tensor:
        """Base + delta; the delta alone without a base."""
        return delta if self.base is None else self.base + delta


Combine = Callable[[RowBlock], Tensor]
"""What a method returns: the merged rows of one block."""


class TensorGroup:
    """What a merge method sees. It may read the blocks as often as it needs to measure something first."""

    def __init__(
        self,
        name: str,
        sources: Sequence[TensorSource],
        base: TensorSource | None = None,
        *,
        option_tensors: Mapping[str, Sequence[TensorSource]] | None = None,
        seed: int = 0,
        device: str = "cpu",
        block_elements: int = BLOCK_ELEMENTS,
        scales: Sequence[float] = (),
    ) -> None:
        """`name` is the output tensor's; with `seed` it names the random numbers of this tensor. `option_tensors` has,
        for each option that names files of tensors, this tensor from each of them; Gram matrices become `grams`. With
        `scales`, one for each model, the models are as far from the base as these say."""
        self.name, self.seed, self.device = name, seed, device
        self._scales = list(scales)
        self._sources, self._base = list(sources), base
        given = dict(option_tensors or {})
        self.grams = {
            option: [s for s in sources if isinstance(s, GramSource)]
            for option, sources in given.items()
            if all(isinstance(s, GramSource) for s in sources)
        }
        self.option_tensors = {option: sources for option, sources in given.items() if option not in self.grams}
        every = [*self._sources, *([base] if base is not None else [])]
        self.shape = every[0].info.shape
        """Of the output and of every input; a scalar counts as one row."""
        self.dtype = torch.float64 if any(s.info.dtype == torch.float64 for s in every) else torch.float32
        self._rows, self._row_elements = rows_of(self.shape)
        self._block_elements = block_elements
        self._known_finite = 0
        """Rows up to here have been looked at."""

    @property
    def models(self) -> int:
        """How many models there are, not counting the base."""
        return len(self._sources)

    @property
    def has_base(self) -> bool:
        return self._base is not None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """(out, r) and (r, in) of every model, if all are products of two, as the updates of adapters are."""
        found = [(source.left, source.right) for source in self._sources if isinstance(source, LowRankUpdate)]
        return found if len(found) == len(self._sources) else []

    def blocks(self) -> Iterator[RowBlock]:
        """All rows, in order. An empty tensor has no block."""
        for start, stop, _ in spans(self.shape, self._block_elements):
            yield self.block(start, stop)

    def sample(self, elements: int) -> Iterator[RowBlock]:
        """About so many elements, in pieces spread evenly over the rows."""
        pieces = min(64, self._rows)
        rows = max(1, elements // (pieces * max(1, self._row_elements)))
        for piece in range(pieces):
            start = piece * self._rows // pieces
            yield self.block(start, min(start + rows, self._rows))

    def whole(self) -> RowBlock:
        """Everything at once, for methods that work on whole matrices."""
        return self.block(0, self._rows)

    def block(self, start: int, stop: int) -> RowBlock:
        """Rows [start, stop); a tensor of fewer than two axes is one row."""
        shape = (stop - start, *self.shape[1:]) if len(self.shape) > 1 else self.shape
        tensors = torch.empty((self.models, *shape), dtype=self.dtype, device=self.device)
        for into, source in zip(tensors, self._sources, strict=True):
            into.copy_(source.rows(start, stop).reshape(shape))
        base = None
        if self._base is not None:
            base = torch.empty(shape, dtype=self.dtype, device=self.device)
            base.copy_(self._base.rows(start, stop).reshape(shape))
        self._require_finite(start, stop, tensors, base)
        if self._scales and base is not None:
            column = torch.tensor(self._scales, dtype=self.dtype, device=self.device)
            tensors.sub_(base).mul_(column.reshape(-1, *[1] * base.dim())).add_(base)
        option_tensors = {
            name: torch.stack([s.rows(start, stop).reshape(shape).to(self.device, self.dtype) for s in sources])
            for name, sources in self.option_tensors.items()
        }
        return RowBlock(start * self._row_elements, tensors, base, option_tensors)

    def _require_finite(self, start: int, stop: int, tensors: Tensor, base: Tensor | None) -> None:
        """A mask or a maximum can swallow a NaN, so every input is looked at and not the result; once is enough."""
        if stop <= self._known_finite:
            return
        if start <= self._known_finite:
            self._known_finite = stop
        looks = tensors.sum() if base is None else tensors.sum() + base.sum()
        if math.isfinite(looks):
            return  # a finite sum has only finite terms; finite terms may overflow, so otherwise look closer
        for source in [*self._sources, *([self._base] if self._base is not None else [])]:
            require_finite_values(source.label, source.rows(start, stop))

    def rows_of(self, result: Tensor) -> Combine:
        """The combine step of a method that has computed the whole result already."""
        flat = result.reshape(-1)

        def combine(block: RowBlock) -> Tensor:
            like = block.tensors[0]
            return flat[block.start : block.start + like.numel()].reshape(like.shape)

        return combine


@dataclass(frozen=True)
class FirstRows:
    """The part of a longer table that all models have."""

    source: TensorSource
    count: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo((self.count, *self.source.info.shape[1:]), self.source.info.dtype)

    @property
    def label(self) -> str:
        return self.source.label

    def rows(self, start: int, stop: int) -> Tensor:
        rows = self.source.rows(start, stop)
        return rows if len(self.source.info.shape) > 1 else rows[: self.count]


@dataclass(frozen=True)
class InMemory:
    """A tensor that is already there."""

    tensor: Tensor
    label: str = "a tensor in memory"

    @property
    def info(self) -> TensorInfo:
        return TensorInfo.of(self.tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop] if self.tensor.dim() > 1 else self.tensor
