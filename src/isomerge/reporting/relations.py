"""How models relate, tensor by tensor: distance, cosine and sign conflict, from samples of rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SAMPLE = 2**14  # elements of a tensor that are looked at; smaller tensors are taken whole
PIECES = 4

Array = npt.NDArray[np.float64]
Rows = Callable[[int, int], Tensor]
"""Rows [start, stop) of one model's tensor; a tensor of fewer than two axes is always asked for whole."""


@dataclass(frozen=True)
class Sums:
    """Over the sampled elements of one tensor. Vectors are what the models add to the base, or the models themselves
    where there is none."""

    products: Mapping[tuple[str, str], float]
    """⟨v, w⟩ of every two models, a model with itself among them."""
    conflicts: int
    """Elements that some model has above zero and another below."""
    apart: Mapping[str, float]
    """‖model − reference‖²"""
    size: float
    """‖reference‖²"""


@dataclass(frozen=True)
class Relation:
    """One tensor, as the models are stored and as they are merged."""

    elements: int
    sampled: int
    before: Sums | None
    after: Sums | None
    matrix: bool = True
    """Of two axes or more. The gains of norms are all near one, and would make any two models look alike."""


def sampled_rows(name: str, shape: Sequence[int], seed: int = 0) -> list[tuple[int, int]]:
    """Which rows of a tensor are looked at: all, or runs of them at places that the seed and the name decide.

    >>> sampled_rows("w", (10, 10)), len(sampled_rows("w", (4096, 4096)))
    ([(0, 10)], 4)
    """
    rows, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    if rows * width <= SAMPLE or rows == 1:
        return [(0, rows)]
    pieces, draw = min(PIECES, rows), random.Random(f"{seed}:{name}")
    length = max(1, SAMPLE // (pieces * width))
    found = []
    for piece in range(pieces):
        low, high = piece * rows // pieces, (piece + 1) * rows // pieces
        run = min(length, high - low)
        start = low + draw.randrange(high - low - run + 1)
        found.append((start, start + run))
    return found


def relation(
    name: str,
    shape: Sequence[int],
    before: Mapping[str, Rows] | None,
    after: Mapping[str, Rows] | None,
    *,
    reference: str | None,
    base: str | None = None,
    seed: int = 0,
) -> Relation:
    """Look at one tensor of every model, by their names. `reference` and `base` are among them; without a reference
    there are no distances."""
    rows = sampled_rows(name, shape, seed)
    width = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    sums = [None if side is None else _sums(_read(side, rows), reference, base) for side in (before, after)]
    seen = sum(stop - start for start, stop in rows) * width
    return Relation(math.prod(shape), seen, sums[0], sums[1], len(shape) > 1)


def _read(models: Mapping[str, Rows], rows: Sequence[tuple[int, int]]) -> dict[str, Array]:
    # numpy: on so few numbers torch takes longer to begin than to compute. float64 is as good as any weights.
    return {
        name: np.concatenate([read(start, stop).to("cpu", torch.float64).numpy().ravel() for start, stop in rows])
        for name, read in models.items()
    }


def _sums(models: Mapping[str, Array], reference: str | None, base: str | None) -> Sums:
    names = [name for name in models if name != base]
    vectors = np.stack([models[name] for name in names])
    if base is not None:
        vectors -= models[base]
    # einsum: numpy's own @ would start the threads of its linear algebra in every worker.
    gram = np.einsum("in,jn->ij", vectors, vectors).tolist()
    apart, size = {}, 0.0
    if reference is not None:
        origin = models[reference]
        size = float(np.einsum("n,n->", origin, origin))
        for name in models:
            if name != reference:
                step = models[name] - origin
                apart[name] = float(np.einsum("n,n->", step, step))
    return Sums(
        products={(a, b): gram[i][j] for i, a in enumerate(names) for j, b in enumerate(names) if i <= j},
        conflicts=int(np.count_nonzero((vectors.min(0) < 0) & (vectors.max(0) > 0))),
        apart=apart,
        size=size,
    )


def cosines(relations: Iterable[Relation], side: str) -> dict[tuple[str, str], float]:
    """The cosine of every two models over the matrices among several tensors, or over all where there is no matrix. A
    tensor counts with all its elements, seen or not."""
    products: dict[tuple[str, str], float] = {}
    relations = list(relations)
    for one, sums in _of([one for one in relations if one.matrix] or relations, side):
        for pair, value in sums.products.items():
            products[pair] = products.get(pair, 0.0) + value * one.elements / one.sampled
    names = list(dict.fromkeys(name for pair in products for name in pair))
    found = {}
    for a, b in combinations(names, 2):
        lengths = math.sqrt(products[a, a] * products[b, b])
        both = products.get((a, b), products.get((b, a)))
        if both is not None and lengths > 0:
            found[a, b] = max(-1.0, min(1.0, both / lengths))
    return found


def conflict(relations: Iterable[Relation], side: str) -> float | None:
    """The share of elements in which models pull in opposite directions."""
    elements = opposed = 0.0
    for one, sums in _of(relations, side):
        if len(sums.products) > 1:
            elements += one.elements
            opposed += sums.conflicts * one.elements / one.sampled
    return opposed / elements if elements else None


def distances(relations: Iterable[Relation], side: str) -> dict[str, float]:
    """√(Σ‖model − reference‖² / Σ‖reference‖²) of every model."""
    apart: dict[str, float] = {}
    size: dict[str, float] = {}
    for one, sums in _of(relations, side):
        for name, value in sums.apart.items():
            apart[name] = apart.get(name, 0.0) + value * one.elements / one.sampled
            size[name] = size.get(name, 0.0) + sums.size * one.elements / one.sampled
    return {name: math.sqrt(apart[name] / size[name]) for name in apart if size[name] > 0}


def _of(relations: Iterable[Relation], side: str) -> list[tuple[Relation, Sums]]:
    return [(one, sums) for one in relations if one.sampled and (sums := getattr(one, side)) is not None]
