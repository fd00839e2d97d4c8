"""Σ over examples of the squared gradient of every parameter: one backward pass for a batch where that is possible.

Squares of sums are no sums of squares, so examples have to be told apart (how: `isomerge.calibration.parameter_uses`).
Where that fails — experts that pick tokens from all examples at once, a classifier that takes one example at a time —
each example is a batch of its own, which is as exact and slower. For every size of batches one example is computed both
ways, and the slow way is taken where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from isomerge.calibration.parameter_uses import ParameterUse, ParameterUses, Unseen
from isomerge.data.base import Batch
from isomerge.errors import CheckpointError
from isomerge.running.passes import examples_in

NEAR = 1e-2
"""How far, relative to its length, a gradient may be from the same one computed alone: above the rounding of an
accelerator's fast convolutions, far below what a mixed-up example would make."""
FLOOR = 1e-5
"""The same relative to the longest gradient: some gradients are zero but for rounding."""
BYTES = {"cpu": 2**23, "cuda": 2**28}
"""Of examples' gradients held at once. A processor is fastest where they fit its cache."""

Scores = Callable[[Batch, int], Iterable[Tensor]]
"""Runs the model and gives one scalar after another, each a sum over the batch's examples; also gets the number of the
first of them."""


class SquaredGradients:
    """Sums of squared gradients of the parameters that ask for gradients, in float64."""

    def __init__(self, model: torch.nn.Module, scores: Scores) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        self.one_by_one = False
        """Examples could not be told apart."""
        self._scores = scores
        self._checked: set[tuple[object, ...]] = set()
        """Kinds of batches of which an example was computed both ways."""

    def add(self, batch: Batch, first: int) -> None:
        """The examples of a batch; `first` is the number of the first of them."""
        size = examples_in(batch)
        if size > 1 and not self.one_by_one:
            # A length that the batch has as well could be taken for it.
            lengths = tuple(tuple(tensor.shape) for tensor in batch.values())
            mistakable = any(size in shape[1:] for shape in lengths)
            if self._together(batch, first, size, (size, *lengths) if mistakable else (size,)):
                return
            if mistakable:
                self.add(_part(batch, slice(0, size - 1)), first)
                self.add(_part(batch, slice(size - 1, size)), first + size - 1)
                return
            self.one_by_one = True
        for example in range(size):
            for score in self._scores(_part(batch, slice(example, example + 1)), first + example):
                for total, grad in zip(self.sums, self._gradients(score), strict=True):
                    if grad is not None:
                        total.addcmul_(grad.double(), grad.double())

    def _together(self, batch: Batch, first: int, size: int, kind: tuple[object, ...]) -> bool:
        """False, and nothing is added, where the examples cannot be told apart."""
        try:
            with ParameterUses(self.parameters, batch, size) as uses:
                scores = iter(self._scores(batch, first))
                score = next(scores, None)
            if score is None:
                return True
            if kind not in self._checked and not self._agree(batch, first, score, uses.uses):
                return False
            self._checked.add(kind)
        except (Unseen, CheckpointError, ValueError, RuntimeError):  # a model at fault fails alone as well
            return False
        while score is not None:
            self._add_squares(score, uses.uses)
            score = next(scores, None)
        return True

    def _add_squares(self, score: Tensor, uses: list[ParameterUse]) -> None:
        for total, parameter, parts in self._by_parameter(score, uses):
            ids = parts[0][0].ids() if len(parts) == 1 else None
            if ids is not None:
                _add_rows(total, ids, *parts[0])
                continue
            size = parts[0][0].examples
            step = max(1, BYTES.get(parameter.device.type, BYTES["cpu"]) // max(1, parameter.nbytes))
            squares = torch.zeros_like(parameter)  # of one batch in the model's own precision: its rounding is no worse
            for start in range(0, size, step):
                _add_squares_of(_summed(parts, parameter, slice(start, min(start + step, size))), squares)
            total += squares

    def _by_parameter(
        self, score: Tensor, uses: list[ParameterUse]
    ) -> Iterator[tuple[Tensor, Tensor, list[tuple[ParameterUse, Tensor]]]]:
        """Every parameter with its sum, and its uses with the gradients of what they made."""
        grads = torch.autograd.grad(score, [use.made for use in uses], retain_graph=True, allow_unused=True)
        parts: dict[int, list[tuple[ParameterUse, Tensor]]] = {}
        for use, grad in zip(uses, grads, strict=True):
            if grad is not None:
                for root in use.roots:
                    parts.setdefault(id(root), []).append((use, grad))
        for total, parameter in zip(self.sums, self.parameters, strict=True):
            if id(parameter) in parts:
                yield total, parameter, parts[id(parameter)]

    def _agree(self, batch: Batch, first: int, score: Tensor, uses: list[ParameterUse]) -> bool:
        """Whether the first example's gradients are those it has alone."""
        alone = next(iter(self._scores(_part(batch, slice(0, 1)), first)), None)
        if alone is None:
            return False
        expected = self._gradients(alone)
        together = {id(p): _summed(parts, p, slice(0, 1))[0] for _, p, parts in self._by_parameter(score, uses)}
        lengths = [0.0 if grad is None else float(grad.norm()) for grad in expected]
        for parameter, grad, length in zip(self.parameters, expected, lengths, strict=True):
            zero = torch.zeros_like(parameter)
            difference = together.get(id(parameter), zero) - (zero if grad is None else grad)
            if float(difference.norm()) > NEAR * length + FLOOR * max(lengths):
                return False
        return True

    def _gradients(self, score: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(score, self.parameters, retain_graph=True, allow_unused=True)


def _part(batch: Batch, part: slice) -> Batch:
    return {name: tensor[part] for name, tensor in batch.items()}


def _summed(parts: list[tuple[ParameterUse, Tensor]], parameter: Tensor, part: slice) -> Tensor:
    """A parameter that is used several times has the sum of what each use says."""
    first, *others = (use.gradients(grad, parameter, part) for use, grad in parts)
    for other in others:
        first = first + other
    return first


def _add_squares_of(examples: Tensor, total: Tensor) -> None:
    if examples.is_cuda:
        total += examples.square().sum(0)  # few and large kernels
    else:
        for one in examples:
            total.addcmul_(one, one)  # no large tensor in between


def _add_rows(total: Tensor, ids: Tensor, use: ParameterUse, grad: Tensor) -> None:
    """Of a table, each example touches the few rows that it looks up."""
    ids = ids.flatten(1)
    keys = (ids + torch.arange(len(ids), device=ids.device)[:, None] * len(total)).flatten()
    rows, place = keys.unique(return_inverse=True)
    values = torch.zeros(len(rows), total.shape[1], dtype=torch.float64, device=total.device)
    values.index_add_(0, place, grad.detach().reshape(len(place), -1).double())
    padding = use.kwargs.get("padding_idx")
    squares = values.square_()
    if padding is not None:
        squares[rows % len(total) == padding] = 0
    total.index_add_(0, rows % len(total), squares)
