"""What a combination is, and how a function becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LEAST = -1e4
"""A logarithm of zero that can be added up and multiplied with a weight of zero."""


@dataclass(frozen=True)
class Stack:
    """A linear model on the log-probabilities of all members."""

    matrix: Tensor
    """(classes, members · classes)"""
    bias: Tensor
    """(classes,)"""


@dataclass(frozen=True)
class Shares:
    """How much each member counts."""

    weights: Tensor
    """(members,), float64; they sum to one."""
    stack: Stack | None = None
    beliefs: Tensor | None = None
    """(members, rows…): logarithms of the weights where these follow from what was read."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> Shares:
        """
        >>> Shares.of([1, 3]).weights.tolist()
        [0.25, 0.75]
        """
        given = torch.tensor(weights, dtype=torch.float64)
        return cls(given / given.sum())

    def logs(self, like: Tensor) -> Tensor:
        """The logarithms of the weights, as they broadcast over (members, rows…, classes)."""
        own = (self.weights.log() if self.beliefs is None else self.beliefs).to(like)
        return own.reshape(*own.shape, *[1] * (like.dim() - own.dim()))


Combine = Callable[[Tensor, Shares], Tensor]
"""Log-probabilities (members, rows…, classes) to those of all together (rows…, classes)."""
Found = Literal["weights", "stack"]


@dataclass(frozen=True)
class Combination:
    """A way to combine, and what it needs."""

    name: str
    summary: str
    reference: str | None
    function: Combine
    weighs: bool
    """Members may have weights."""
    finds: Found | None
    """What is fitted on held-out predictions, where it is not given."""
    reads: bool
    """The weights follow from the text so far: language models only."""
    averages: bool
    """It is also a way to combine numbers."""

    def __call__(self, logs: Tensor, shares: Shares) -> Tensor:
        return self.function(logs, shares)


COMBINATIONS: dict[str, Combination] = {}


def combination(
    *,
    weighs: bool = True,
    finds: Found | None = None,
    reads: bool = False,
    averages: bool = False,
    reference: str | None = None,
) -> Callable[[Combine], Combine]:
    """Enter a function into the table. Its name is that of the combination, the first line of its docstring the
    summary."""

    def enter(function: Combine) -> Combine:
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        name = function.__name__
        COMBINATIONS[name] = Combination(name, summary, reference, function, weighs, finds, reads, averages)
        return function

    return enter
