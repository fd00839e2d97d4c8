"""What two models are to each other: the one meaning of *distance*, *cosine*, *siblings* and *strangers*.

Distance
    ‖a − b‖ / ‖b‖, relative to the model that is compared with: the anchor, the base or the first model.
Cosine
    ⟨a, b⟩ / (‖a‖ ‖b‖).
Which tensors count
    Matrices (two axes or more), or every tensor where there is no matrix: gains near one make any two models look
    alike. For a whole model, the matrices of its layers: vocabulary tables say more about tokens than about kinship.
    Both numbers are over the same tensors, so they never contradict each other: for models of one size, distance² =
    2 (1 − cosine).
Siblings
    Models in one basis: their layers have something in common (a cosine of at least `RELATED`), and no unit gains by
    changing its place. Fine-tunes of one base are siblings. `align` decides by solving for every unit, `check` by a
    sample of units and the cosine, and `merge`, which solves nothing unasked, by the cosine alone.
Strangers
    Models of one architecture that are not siblings: trained apart, or one model with its units in another order.
"""

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

IDENTICAL, SIBLINGS, STRANGERS = "identical", "siblings", "strangers"
VERDICTS = (IDENTICAL, SIBLINGS, STRANGERS)  # from the nearest to the farthest
RELATED = 0.2
"""The cosine of strangers is about 0; alignment at level `full` brought those we measured to 0.27 and more."""

ONE_BASE = 0.5
"""Siblings fine-tuned far from one base on different skills had 0.8 and more, so a cosine below this is not theirs,
though it may be that of strangers that were aligned."""


# --- the numbers ------------------------------------------------------------------------------------------------------
def relative_distance(apart: float, size: float) -> float | None:
    """‖a − b‖ / ‖b‖ from the two squares; None where b is zero and a is not.

    >>> relative_distance(2.0, 8.0), relative_distance(0.0, 0.0), relative_distance(1.0, 0.0)
    (0.5, 0.0, None)
    """
    if size > 0:
        return math.sqrt(apart / size)
    return 0.0 if apart == 0 else None


def cosine_of(product: float, first: float, second: float) -> float | None:
    """⟨a, b⟩ / (‖a‖ ‖b‖) from the product and the two squares; None where one of them is zero.

    >>> cosine_of(2.0, 4.0, 4.0)
    0.5
    """
    lengths = math.sqrt(first * second)
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0 else None


def are_related(cosine: float | None) -> bool:
    """Whether layers with this cosine have something in common.

    >>> are_related(0.98), are_related(0.01), are_related(None)
    (True, False, False)
    """
    return cosine is not None and cosine >= RELATED


# --- the tensors that count -------------------------------------------------------------------------------------------
def place_of(tensor: str) -> tuple[str, int, str]:
    """The stack, the layer (−1 outside the layers) and the part that a tensor belongs to, from its name.

    >>> place_of("model.layers.3.mlp.experts.5.w1.weight")
    ('model.layers', 3, 'mlp.experts.*.w1')
    >>> place_of("lm_head.weight")
    ('', -1, 'lm_head')
    """
    words = tensor.split(".")
    if len(words) > 1 and words[-1] in ("weight", "bias", "gamma", "beta"):
        words = words[:-1]
    number = next((place for place, word in enumerate(words) if word.isdigit()), None)
    if number is None:
        return "", -1, ".".join(words)
    part = ".".join("*" if word.isdigit() else word for word in words[number + 1 :])
    return ".".join(words[:number]), int(words[number]), part or "layer"


def in_layers(names: Iterable[str]) -> list[str]:
    """The tensors inside layers, or all where there are no layers."""
    names = list(names)
    return [name for name in names if place_of(name)[1] >= 0] or names


def counted(axes: Mapping[str, int]) -> list[str]:
    """Which tensors of a model count, given how many axes each has: the matrices of its layers.

    >>> counted({"layers.0.up.weight": 2, "layers.0.norm.weight": 1, "embed.weight": 2})
    ['layers.0.up.weight']
    >>> counted({"norm.weight": 1})
    ['norm.weight']
    """
    names = in_layers(axes)
    return [name for name in names if axes[name] > 1] or names


def in_few_layers(names: Iterable[str]) -> list[str]:
    """The tensors of the first layer, of one in the middle and of the last.

    >>> in_few_layers([f"layers.{number}.weight" for number in range(9)] + ["head.weight"])
    ['layers.0.weight', 'layers.4.weight', 'layers.8.weight']
    """
    inside = [name for name in names if place_of(name)[1] >= 0]
    layers = sorted({place_of(name)[:2] for name in inside})
    chosen = {layers[place] for place in (0, len(layers) // 2, -1)} if layers else set()
    return [name for name in inside if place_of(name)[:2] in chosen]


# --- two models -------------------------------------------------------------------------------------------------------
@dataclass
class PairSums:
    """Σ over weights of two models; sampled weights count for those they stand for."""

    apart: float = 0.0  # ‖a − b‖²
    first: float = 0.0  # ‖a‖²
    second: float = 0.0
    product: float = 0.0  # ⟨a, b⟩
    conflict: float = 0.0  # weights whose signs differ
    nonzero: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float = 1.0) -> PairSums:
        signs = a.sign() * b.sign()  # the product of the weights may be too small to have a sign
        return cls(
            apart=scale * squared(a - b),
            first=scale * squared(a),
            second=scale * squared(b),
            product=scale * inner(a, b),
            conflict=scale * int((signs < 0).sum()),
            nonzero=scale * int((signs != 0).sum()),
            count=scale * a.numel(),
        )

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(**{key: getattr(self, key) + getattr(other, key) for key in self.__dataclass_fields__})

    @property
    def distance(self) -> float | None:
        """Of the second model from the first."""
        return relative_distance(self.apart, self.first)

    @property
    def cosine(self) -> float | None:
        return cosine_of(self.product, self.first, self.second)

    @property
    def sign_conflict(self) -> float:
        """Of all weights, those with different signs: one half between strangers."""
        return self.conflict / self.count if self.count else 0.0

    @property
    def change_conflict(self) -> float | None:
        """Of task vectors: among weights that both changed, those changed in opposite directions."""
        return self.conflict / self.nonzero if self.nonzero else None

    @property
    def norm_ratio(self) -> float | None:
        return math.sqrt(self.first / self.second) if self.second else None


def squared(tensor: Tensor) -> float:
    return inner(tensor, tensor)


def inner(a: Tensor, b: Tensor) -> float:
    """Without a third tensor in memory; in float64 where float32 has no room for the result."""
    a, b = a.reshape(-1), b.reshape(-1)
    result = float(torch.dot(a, b))
    return result if result and math.isfinite(result) else float(torch.dot(a.double(), b.double()))


# --- any number of models, from samples of rows -----------------------------------------------------------------------
SAMPLE = 2**14  # elements of a tensor that are read; smaller tensors are read whole
PIECES = 4

Array = npt.NDArray[np.float64]
Rows = Callable[[int, int], Tensor]
"""Rows [start, stop) of one model's tensor; a tensor of fewer than two axes is always asked for whole."""


@dataclass(frozen=True)
class SampleSums:
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
    before: SampleSums | None
    after: SampleSums | None
    matrix: bool = True


def sampled_rows(name: str, shape: Sequence[int], seed: int = 0) -> list[tuple[int, int]]:
    """Which rows of a tensor are read: all, or runs of them at places that the seed and the name decide.

    >>> sampled_rows("w", (10, 10)), len(sampled_rows("w", (4096, 4096)))
    ([(0, 10)], 4)
    """
    rows, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    if rows * width <= SAMPLE or rows == 1:
        return [(0, rows)]
    pieces, draw = min(PIECES, rows), random.Random(f"{seed}:{name}")
    length = max(1, SAMPLE // (pieces * width))
    runs = []
    for piece in range(pieces):
        low, high = piece * rows // pieces, (piece + 1) * rows // pieces
        run = min(length, high - low)
        start = low + draw.randrange(high - low - run + 1)
        runs.append((start, start + run))
    return runs


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
    """Compare one tensor of every model, by their names. `reference` and `base` are among them; without a reference
    there are no distances."""
    rows = sampled_rows(name, shape, seed)
    width = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    sums = [None if side is None else _sums(_read(side, rows), reference, base) for side in (before, after)]
    sampled = sum(stop - start for start, stop in rows) * width
    return Relation(math.prod(shape), sampled, sums[0], sums[1], len(shape) > 1)


def _read(models: Mapping[str, Rows], rows: Sequence[tuple[int, int]]) -> dict[str, Array]:
    # numpy: on so few numbers torch takes longer to begin than to compute. float64 is as good as any weights.
    return {
        name: np.concatenate([read(start, stop).to("cpu", torch.float64).numpy().ravel() for start, stop in rows])
        for name, read in models.items()
    }


def _sums(models: Mapping[str, Array], reference: str | None, base: str | None) -> SampleSums:
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
    return SampleSums(
        products={(a, b): gram[i][j] for i, a in enumerate(names) for j, b in enumerate(names) if i <= j},
        conflicts=int(np.count_nonzero((vectors.min(0) < 0) & (vectors.max(0) > 0))),
        apart=apart,
        size=size,
    )


def cosines(relations: Iterable[Relation], side: str) -> dict[tuple[str, str], float]:
    """The cosine of every two models over several tensors. A tensor counts with all its elements, sampled or not."""
    products: dict[tuple[str, str], float] = {}
    for one, sums in _matrices(relations, side):
        for pair, value in sums.products.items():
            products[pair] = products.get(pair, 0.0) + value * one.elements / one.sampled
    names = list(dict.fromkeys(name for pair in products for name in pair))
    angles = {}
    for a, b in combinations(names, 2):
        both = products.get((a, b), products.get((b, a)))
        angle = None if both is None else cosine_of(both, products[a, a], products[b, b])
        if angle is not None:
            angles[a, b] = angle
    return angles


def distances(relations: Iterable[Relation], side: str) -> dict[str, float]:
    """The distance of every model from the reference over several tensors."""
    apart: dict[str, float] = {}
    size: dict[str, float] = {}
    for one, sums in _matrices(relations, side):
        for name, value in sums.apart.items():
            apart[name] = apart.get(name, 0.0) + value * one.elements / one.sampled
            size[name] = size.get(name, 0.0) + sums.size * one.elements / one.sampled
    lengths = {name: relative_distance(apart[name], size[name]) for name in apart}
    return {name: length for name, length in lengths.items() if length is not None}


def conflict(relations: Iterable[Relation], side: str) -> float | None:
    """The share of all elements in which models pull in opposite directions."""
    elements = opposed = 0.0
    for one, sums in _known(relations, side):
        if len(sums.products) > 1:
            elements += one.elements
            opposed += sums.conflicts * one.elements / one.sampled
    return opposed / elements if elements else None


def _matrices(relations: Iterable[Relation], side: str) -> list[tuple[Relation, SampleSums]]:
    relations = list(relations)
    return _known([one for one in relations if one.matrix] or relations, side)


def _known(relations: Iterable[Relation], side: str) -> list[tuple[Relation, SampleSums]]:
    return [(one, sums) for one in relations if one.sampled and (sums := getattr(one, side)) is not None]
