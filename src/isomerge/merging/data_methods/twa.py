"""TWA (Li et al. 2022, arXiv 2205.13104): the mean of checkpoints with coefficients that are trained.

    min_a L(Σ_k a_k W_k) by gradient descent in the span of the checkpoints: W ← W − η P Pᵀ ∇L(W)

P is an orthonormal basis of the span, so that a step does not depend on how alike the checkpoints are. It is never
formed: with the Gram matrix G = Wᵀ W = U Λ Uᵀ it is P = W U Λ^(−1/2), so that the step is a ← a − η G⁺ ∂L/∂a and
‖Pᵀ ∇L‖² = (∂L/∂a)ᵀ G⁺ ∂L/∂a. It starts from the plain mean, whose gradient may be near zero: so η is divided by the
norm of all gradients so far (AdaGrad-Norm, arXiv 1806.01811).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from isomerge.errors import RequestError
from isomerge.merging.coefficient_objectives import LabelLoss
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.assembly import sum_of
from isomerge.merging.learned_coefficients import CoefficientMerge
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs

SAME = 1e-12
"""Directions of the span that are smaller than this, as a share of the largest (squared), are rounding."""
T = TypeVar("T")


@data_method(
    data="one",
    passes="the average, for as many batches as there are steps, with gradients; and twice for its loss",
    labels=True,
    reference="https://arxiv.org/abs/2205.13104",
)
def twa(inputs: MergeInputs, *, steps: int = 100, rate: float = 0.1) -> MergedWeights:
    """Average checkpoints with coefficients that are trained on labelled data, from the plain mean on.

    Options:
        steps: how many, each on one batch
        rate: the length of the first step, as a share of how far the checkpoints are from their mean
    """
    count = len(inputs.models)
    merge = CoefficientMerge(inputs, [1 / count] * count, "model", labels=True, free=True)
    descent = partial(descend_in_span, gram_matrix(merge.span.parts.values()))
    learned = merge.learn(LabelLoss.of(inputs, merge.config), steps, rate, descent)
    notes = []
    if not learned["after"] < learned["before"]:
        notes.append(
            "training the coefficients did not lower the loss, so the result is the plain mean; try another `rate`"
        )
    return merge.result({"kind": "loss", **learned}, notes)


def gram_matrix(stacks: Iterable[Tensor]) -> Tensor:
    """Wᵀ W of checkpoints whose tensors are stacked."""
    rows = (stack.flatten(1).double() for stack in stacks)
    return sum_of([row @ row.T for row in rows])


def descend_in_span(
    gram: Tensor,
    parameters: Sequence[Tensor],
    loss: Callable[[T], Tensor],
    batches: Iterator[T],
    steps: int,
    rate: float,
    report: Callable[[int], None],
) -> None:
    """Steps of the coefficients (checkpoints, 1), the first as long as `rate` × the spread of the checkpoints."""
    (coefficients,) = parameters
    inverse = torch.linalg.pinv(gram, rtol=SAME, hermitian=True)
    spread = math.sqrt(max(0.0, float(gram.diagonal().mean() - gram.mean())))
    squares = 0.0
    coefficients.requires_grad_(True)
    for step in range(steps):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(next(batches)), coefficients)
        if not gradient.isfinite().all():
            raise RequestError("twa: the loss is not a number. Try a smaller rate, or check the data.", keys=("rate",))
        change = inverse @ gradient
        squares += max(0.0, float((gradient * change).sum()))
        with torch.no_grad():
            coefficients -= rate * spread / (math.sqrt(squares) or 1.0) * change
        report(step + 1)
    coefficients.requires_grad_(False)
