"""Regression mean: the weights that, on every model's own inputs, make what that model made, as nearly as one can.

    W = argmin Σ_k w_k ‖X_k W − X_k W_k‖²  =  (Σ w_k G_k)⁻¹ Σ w_k G_k W_k,     G_k = X_kᵀ X_k

Jin et al. 2023 (arXiv 2212.09849) multiply what is off the diagonal of every G_k by α = 0.9, since inputs that go
together in one sample of data need not do so in the next. Where the data do not say (inputs that are always zero, fewer
samples than inputs) a small ridge towards the plain mean decides: + λ ‖W − W̄‖².
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.errors import RequestError

WEAK = 1e-10
"""A pivot below this share of its diagonal entry is rounding of the sums."""
RIDGE = 1e-6
"""Of the mean diagonal entry, where a ridge is needed."""


@dataclass(frozen=True)
class RegressionMean:
    """The merged weight as (out, in), and what had to be added to the diagonal."""

    weight: Tensor
    ridge: float


def shrunk(gram: Tensor, alpha: float) -> Tensor:
    """Everything off the diagonal times α."""
    return gram * alpha + torch.diag(gram.diagonal() * (1 - alpha))


def regression_mean(
    weights: Sequence[Tensor], grams: Sequence[Tensor], shares: Sequence[float], *, alpha: float
) -> RegressionMean:
    """The merged weight of (out, in) weights with (in, in) Gram matrices, solved in float64."""
    if not 0 <= alpha <= 1:
        raise RequestError(f"regmean: alpha is {alpha}; it is a share between 0 and 1.")
    width = weights[0].shape[1]
    if any(tuple(gram.shape) != (width, width) for gram in grams):
        raise RequestError(
            f"regmean: a weight has {width} inputs and the Gram matrices {[len(gram) for gram in grams]}. The "
            "statistics belong to another model; measure these models."
        )
    weights = [weight.double() for weight in weights]
    total = sum(shares)
    if total <= 0 or any(share < 0 for share in shares):
        raise RequestError(f"regmean: the weights {list(shares)} of the models must not be negative or all zero.")
    mean = sum((w * (share / total) for w, share in zip(weights, shares, strict=True)), torch.zeros_like(weights[0]))
    left, right = torch.zeros_like(grams[0]), torch.zeros_like(weights[0])
    for weight, gram, share in zip(weights, grams, shares, strict=True):
        part = shrunk(gram.to(weight.device, torch.float64), alpha) * share
        left += part
        # About the mean, so that where the models agree nothing is lost to rounding.
        right += (weight - mean) @ part
    change, ridge = _solve(left, right)
    return RegressionMean(mean + change, ridge)


def with_column_of_ones(product: Tensor, total: Tensor, count: int) -> Tensor:
    """Σ x xᵀ of inputs with a 1 appended, from Σ x xᵀ, Σ x and the number of samples."""
    top = torch.cat([product, total[:, None]], dim=1)
    bottom = torch.cat([total, torch.tensor([float(count)], dtype=torch.float64, device=total.device)])
    return torch.cat([top, bottom[None]])


def _solve(left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """X with X · left = right, and the ridge it took."""
    diagonal = left.diagonal()
    level = float(diagonal.mean()) if len(diagonal) else 0.0
    if level == 0.0:
        return torch.zeros_like(right), 0.0
    # Inputs differ in size by orders of magnitude; scaled to a unit diagonal the pivots can be compared.
    for ridge in (0.0, *(RIDGE * level * 100.0**k for k in range(3))):
        scale = (diagonal + ridge).clamp(min=1e-300).rsqrt()
        scaled = (left + ridge * torch.eye(len(left), dtype=left.dtype, device=left.device)) * scale * scale[:, None]
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if int(failed) == 0 and float(factor.diagonal().min()) ** 2 > WEAK:
            return torch.cholesky_solve((right * scale).T, factor).T * scale, ridge
    raise RequestError("regmean: the Gram matrices are not positive. They are damaged, or not Gram matrices.")


# --- too little data --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shortage:
    """A linear map whose data say too little."""

    tensor: str
    samples: int
    inputs: int
    """As many samples are needed to see every direction."""
    ridge: float
    """What was added to the diagonal of the Gram matrix; 0 where that was not needed."""


class StatisticsWarning(UserWarning):
    """A merge went on with less than it should have: few samples, or a ridge that had to decide."""

    def __init__(self, shortages: Sequence[Shortage]) -> None:
        self.shortages = tuple(shortages)
        super().__init__(_message(self.shortages))


def shortage_warning(tensor: str, samples: int, inputs: int, ridge: float, alpha: float) -> StatisticsWarning | None:
    """The warning for one linear map, or nothing."""
    if ridge == 0 and (samples >= inputs or alpha < 1):
        return None
    return StatisticsWarning([Shortage(tensor, samples, inputs, ridge)])


@contextlib.contextmanager
def one_shortage_warning() -> Iterator[None]:
    """One warning at the end instead of one for every tensor."""
    shortages: list[Shortage] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StatisticsWarning)
        yield
    for warning in caught:
        if isinstance(warning.message, StatisticsWarning):
            shortages += warning.message.shortages
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if shortages:
        warnings.warn(StatisticsWarning(shortages), stacklevel=3)


def _message(shortages: Sequence[Shortage]) -> str:
    """How many samples there are and are needed, for which tensors, and what was done."""
    worst = max(shortages, key=lambda shortage: shortage.inputs - shortage.samples)
    few = [shortage.inputs for shortage in shortages if shortage.samples < shortage.inputs]
    ridges = [shortage.ridge for shortage in shortages if shortage.ridge > 0]
    sentences = [
        f"Merging by regression: the data say too little about {_maps(len(shortages))}, such as '{worst.tensor}' with "
        f"{worst.samples:,} samples for {worst.inputs:,} inputs."
    ]
    if few:
        sentences.append(
            f"There are fewer samples than inputs for {_maps(len(few))}; at least {max(few):,} are needed to see every "
            "direction, and ten times as many are better."
        )
    if ridges:
        sentences.append(
            f"The Gram matrix is singular for {_maps(len(ridges))}; there a ridge of {max(ridges):.3g} or less pulls "
            "what the data do not say to the mean."
        )
    return " ".join(sentences)


def _maps(number: int) -> str:
    return f"{number:,} linear maps" if number > 1 else "1 linear map"
