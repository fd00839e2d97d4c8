"""What methods measure in a pass over the blocks before they combine them: products, sums, order statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

DOT = 2**15  # a float32 sum of so many products is good to 1e-7, which the errors of all pieces average down further
SAMPLED = 2**16
TINY = 1e-25
GATHERED = 2**21
PENDING = 2**18
BINS = 2**14


def mixture(weights: Sequence[float], base: float | None = None) -> Combine:
    """The combine step of every method whose result is Σ w_k W_k (+ w₀ base)."""

    def combine(block: RowBlock) -> Tensor:
        result = block.tensors[0] * weights[0] if weights else torch.zeros_like(block.base)  # type: ignore[arg-type]
        for tensor, weight in zip(block.tensors[1:], weights[1:], strict=True):
            result.add_(tensor, alpha=weight)
        if base is not None and block.base is not None:
            result.add_(block.base, alpha=base)
        return result

    return combine


def gram(group: TensorGroup, *, base: bool = False, deltas: bool = False) -> list[list[float]]:
    """The inner products of all models in float64; with `base`, the base is the last one; with `deltas`, of what each
    model adds to the base. Norms, angles and any mean on a sphere follow from it without a further look."""
    count = group.models + (base and group.has_base)
    total = torch.zeros(count, count, dtype=torch.float64)
    for block in group.blocks():
        # In place: the block is ours, and another allocation of its size costs as much as the difference.
        values = block.tensors.sub_(block.base) if deltas and block.base is not None else block.tensors
        rows = list(_rows(values))
        if base and block.base is not None:
            rows.append(block.base.reshape(-1))
        total += products(rows)
    return total.tolist()


def products(rows: Sequence[Tensor]) -> Tensor:
    """All inner products of some vectors, summed in float64."""
    result = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, one in enumerate(rows):
        for j, other in enumerate(rows[: i + 1]):
            result[i, j] = result[j, i] = _dot(one, other)
    largest = float(result.diagonal().max())
    # Squares leave float32 long before the numbers do.
    if rows[0].dtype != torch.float64 and not TINY < largest < math.inf:
        wide = torch.stack([row.double() for row in rows])
        return (wide @ wide.T).cpu()
    return result


def _dot(one: Tensor, other: Tensor) -> float:
    if one.device.type != "cpu":
        return float((one * other).sum(dtype=torch.float64))
    return sum(float(a.dot(b)) for a, b in zip(torch.split(one, DOT), torch.split(other, DOT), strict=True))


def total(group: TensorGroup, measure: Callable[[RowBlock], Tensor]) -> Tensor:
    """Σ over the blocks of a tensor that `measure` makes of each, in float64; zero where there is no block."""
    result = torch.zeros((), dtype=torch.float64)
    for block in group.blocks():
        result = result + measure(block).double().cpu()
    return result


def kth_smallest(
    group: TensorGroup, measure: Callable[[RowBlock], Tensor], ranks: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Order statistics without sorting or holding the whole tensor.

    `measure` gives (rows of numbers, …) for a block, and `ranks[r]` lists which order statistics of row r are wanted,
    counted from 0 as in a sorted list. The answer is exact: a sample only says where to look.
    """
    wanted = [(row, rank) for row, some in enumerate(ranks) for rank in some]
    if not wanted:
        values_of: dict[Wanted, float] = {}
    elif group.elements <= SAMPLED:
        values = _sorted(_rows(measure(group.whole())))
        values_of = {(row, rank): float(values[row, rank]) for row, rank in wanted}
    else:
        values_of = _select(group, measure, dict.fromkeys(wanted))
    return [[values_of[row, rank] for rank in some] for row, some in enumerate(ranks)]


def _rows(tensor: Tensor) -> Tensor:
    """One row per entry of the first axis, for scalars too."""
    return tensor.reshape(len(tensor), -1)


def _sorted(rows: Tensor) -> np.ndarray:
    return np.sort(rows.cpu().numpy(), axis=1)  # many times as fast as torch's, and as a partition of either


Wanted = tuple[int, int]
Bracket = tuple[float, float]


def _select(
    group: TensorGroup, measure: Callable[[RowBlock], Tensor], wanted: dict[Wanted, None]
) -> dict[Wanted, float]:
    brackets = _guesses(group, measure, wanted)
    values_of: dict[Wanted, float] = {}
    while brackets:
        below = dict.fromkeys(brackets, 0)
        inside = {key: _Tally() for key in brackets}
        for block in group.blocks():
            values = _rows(measure(block))
            for key, (low, high) in brackets.items():
                smaller, within = _split(values[key[0]], low, high)
                below[key] += smaller
                inside[key].add(within)
        again = {}
        for key, (low, high) in brackets.items():
            place = key[1] - below[key]
            if not 0 <= place < inside[key].count:  # the sample misled: look at everything on the right side
                again[key] = (-math.inf, low) if place < 0 else (high, math.inf)
            elif inside[key].overflowed:
                again[key] = (low, high)
            else:
                values_of[key] = inside[key].kth(place)
        brackets = _narrowed(group, measure, again)
    return values_of


class _Tally:
    """Numbers with how often each occurs: weights stored in few bits differ in few values, so this stays small."""

    def __init__(self) -> None:
        self.count = 0
        self.overflowed = False
        self._pending: list[np.ndarray] = []
        self._waiting = 0
        self._values: np.ndarray | None = None
        self._counts: np.ndarray | None = None

    def add(self, numbers: np.ndarray) -> None:
        self.count += len(numbers)
        if not self.overflowed:
            self._pending.append(numbers)
            self._waiting += len(numbers)
            if self._waiting > PENDING:
                self._compress()
                if self._values is not None and len(self._values) > GATHERED:
                    self.overflowed, self._values, self._counts = True, None, None

    def _compress(self) -> None:
        values, counts = np.unique(np.concatenate(self._pending), return_counts=True)
        if self._values is not None and self._counts is not None:
            values, places = np.unique(np.concatenate([self._values, values]), return_inverse=True)
            counts = np.bincount(places, weights=np.concatenate([self._counts, counts])).astype(np.int64)
        self._pending, self._waiting = [], 0
        self._values, self._counts = values, counts

    def kth(self, place: int) -> float:
        if self._pending:
            self._compress()
        assert self._values is not None and self._counts is not None
        return float(self._values[np.searchsorted(self._counts.cumsum(), place, side="right")])


def _split(row: Tensor, low: float, high: float) -> tuple[int, np.ndarray]:
    """How many numbers lie below a bracket, and those within it."""
    if row.device.type != "cpu":
        return int((row < low).count_nonzero()), row[(row >= low) & (row <= high)].cpu().numpy()
    numbers = row.numpy()  # its comparisons are five times as fast as torch's here
    bottom, top = numbers.dtype.type(low), numbers.dtype.type(high)
    within = numbers[np.flatnonzero((numbers >= bottom) & (numbers <= top))]
    return int(np.count_nonzero(numbers < bottom)), within


def _guesses(
    group: TensorGroup, measure: Callable[[RowBlock], Tensor], wanted: dict[Wanted, None]
) -> dict[Wanted, Bracket]:
    """Where each order statistic lies, to about five standard deviations of what a sample can tell."""
    sample = torch.cat([_rows(measure(block)) for block in group.sample(SAMPLED)], dim=1)
    values = _sorted(sample[:, :: max(1, sample.shape[1] // SAMPLED)])
    count = values.shape[1]
    brackets = {}
    for row, rank in wanted:
        share = rank / group.elements
        margin = 5 * math.sqrt(max(share * (1 - share) * count, 1)) + 3
        low, high = math.floor(share * count - margin), math.ceil(share * count + margin)
        brackets[row, rank] = (
            float(values[row, low]) if low >= 0 else -math.inf,
            float(values[row, high]) if high < count else math.inf,
        )
    return brackets


def _narrowed(
    group: TensorGroup, measure: Callable[[RowBlock], Tensor], brackets: dict[Wanted, Bracket]
) -> dict[Wanted, Bracket]:
    """The bin of a fine histogram that holds each order statistic, for brackets that hold too much or are open."""
    result = {}
    for (row, rank), (low, high) in brackets.items():
        low, high = _closed(group, measure, row, low, high)
        edges = torch.linspace(low, high, BINS, dtype=torch.float64).to(group.dtype)
        edges[0], edges[-1] = low, high
        counts = torch.zeros(BINS + 1, dtype=torch.int64)
        for block in group.blocks():
            values = _rows(measure(block))[row].cpu()
            counts += torch.bincount(torch.bucketize(values, edges, right=True), minlength=BINS + 1)
        # Bin i holds edges[i-1] <= value < edges[i], so the last one holds the values equal to the upper end too.
        place = int((counts.cumsum(0) <= rank).count_nonzero())
        start = float(edges[max(place - 1, 0)])
        end = float(edges[min(place, BINS - 1)])
        after = float(torch.nextafter(torch.tensor(start, dtype=group.dtype), torch.tensor(math.inf)))
        result[row, rank] = (start, start if after >= end else end)
    return result


def _closed(
    group: TensorGroup, measure: Callable[[RowBlock], Tensor], row: int, low: float, high: float
) -> tuple[float, float]:
    """The bracket with its open ends replaced by the extremes."""
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    extremes = [_rows(measure(block))[row].aminmax() for block in group.blocks()]
    least, most = min(float(e.min) for e in extremes), max(float(e.max) for e in extremes)
    return (low if math.isfinite(low) else least), (high if math.isfinite(high) else most)
