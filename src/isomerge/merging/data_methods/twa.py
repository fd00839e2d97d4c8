"""TWA (Li et al. 2022, arXiv 2205.13104): the mean of checkpoints with coefficients that are trained.

    min_a L(Σ_k a_k W_k) by gradient descent in the span of the checkpoints: W ← W − η P Pᵀ ∇L(W)

P is an orthonormal basis of the span, so that a step does not depend on how alike the checkpoints are; it is found from
their Gram matrix G = Wᵀ W = U Λ Uᵀ as P = W U Λ^(−1/2), which is never formed. It starts from the plain mean, whose
gradient may be near zero: so η is divided by the norm of all gradients so far (AdaGrad-Norm, arXiv 1806.01811).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from isomerge.alignment.learning.path_model import MemoryNames
from isomerge.checkpoint import Checkpoint
from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.learned_coefficients import WHOLE
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.stock import require_runnable

SAME = 1e-12
"""Directions of the span that are smaller than this, as a share of the largest (squared), are rounding."""


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
    if steps < 1 or not 0 < rate < math.inf:
        raise RequestError(
            f"twa: steps={steps} must be at least 1, and the rate ({rate}) above 0.", keys=("steps", "rate")
        )
    first, aligned = inputs.models[0], inputs.aligned()
    models = [aligned.as_checkpoint(model) for model in inputs.models] if aligned else list(inputs.models)
    changes = aligned.config_changes if aligned else {}
    plan = aligned.plan if aligned else first.tensors
    require_runnable(first)
    span = CheckpointSpan(models, {**first.config, **changes}, inputs.device)
    (data,) = inputs.data
    batches = data.passes(first, labels=True, device=inputs.device)
    reading = DataPass(batches, dtype=torch.float32, limit=data.settings.limit, hashed=False)
    mean = torch.full((len(models),), 1 / len(models), dtype=torch.float64)
    trained = SpanDescent(span, reading, inputs).run(steps, rate, mean)
    before, after = span.loss_on(reading, mean), span.loss_on(reading, trained)
    coefficients = trained if after < before else mean
    state = {name: _mixed(models, name, coefficients.tolist()) for name in plan}
    shares = ", ".join(f"{share:.3f}" for share in coefficients.tolist())
    notes = [*(aligned.notes if aligned else ()), f"coefficients of the checkpoints, in their order: {shares}"]
    if not after < before:
        notes.append(
            "training the coefficients did not lower the loss, so the result is the plain mean; try another `rate`"
        )
    names = [model.name for model in inputs.models]
    record = {
        "coefficients": [{"group": WHOLE, "models": dict(zip(names, coefficients.tolist(), strict=True))}],
        "objective": {"kind": "loss", "steps": steps, "before": before, "after": min(before, after)},
    }
    return MergedWeights(state, plan, changes, aligned.record if aligned else None, notes, record)


class CheckpointSpan:
    """Models that are weighted sums of checkpoints, as functions of the coefficients."""

    def __init__(self, models: Sequence[Checkpoint], config: Mapping[str, Any], device: str) -> None:
        floats = [name for name, info in models[0].tensors.items() if info.dtype.is_floating_point]
        self._stacks = {name: torch.stack([model.read(name).float() for model in models]) for name in floats}
        rows = [stack.flatten(1).double() for stack in self._stacks.values()]
        self.gram: Tensor = sum((row @ row.T for row in rows), torch.zeros(len(models), len(models)).double())
        self._names = MemoryNames(config, {name: stack.shape[1:] for name, stack in self._stacks.items()}, device)
        self._stacks = {name: stack.to(device) for name, stack in self._stacks.items()}
        self._device = device

    def basis(self) -> Tensor:
        """C = U Λ^(−1/2), (checkpoints, directions): coefficients of orthonormal directions."""
        sizes, vectors = torch.linalg.eigh(self.gram)
        kept = sizes > SAME * sizes[-1]
        found: Tensor = vectors[:, kept] / sizes[kept].sqrt()
        return found

    def spread(self) -> float:
        """The root mean square distance of the checkpoints from their mean."""
        count = len(self.gram)
        return math.sqrt(max(0.0, float(self.gram.diagonal().mean() - self.gram.sum() / count**2)))

    def loss(self, coefficients: Tensor, batch: Batch) -> Tensor:
        """What the stock class makes of the labels."""
        shares = coefficients.to(self._device, torch.float32)
        weights = self._names.weights({n: torch.tensordot(shares, s, 1) for n, s in self._stacks.items()})
        loss: Tensor = functional_call(self._names.module, weights, kwargs=batch).loss
        return loss.double()

    @torch.no_grad()
    def loss_on(self, reading: DataPass, coefficients: Tensor) -> float:
        """The mean over the examples."""
        total = sum(float(self.loss(coefficients, batch)) * examples_in(batch) for batch in reading)
        return total / reading.examples


@dataclass(frozen=True)
class SpanDescent:
    """Gradient steps in an orthonormal basis, the first of length `rate` × the spread of the checkpoints."""

    span: CheckpointSpan
    reading: DataPass
    inputs: MergeInputs

    def run(self, steps: int, rate: float, start: Tensor) -> Tensor:
        """The coefficients at the end."""
        basis, size, squares = self.span.basis(), rate * self.span.spread(), 0.0
        place = basis.T @ self.span.gram @ start
        batches = itertools.chain.from_iterable(itertools.repeat(self.reading))
        for step, batch in enumerate(itertools.islice(batches, steps), start=1):
            gradient = self._gradient(basis, place, batch)
            squares += float(gradient.square().sum())
            place = place - size / (math.sqrt(squares) or 1.0) * gradient
            self.inputs.report(step, steps, "training coefficients")
        return basis @ place

    def _gradient(self, basis: Tensor, place: Tensor, batch: Batch) -> Tensor:
        variable = place.clone().requires_grad_(True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.span.loss(basis @ variable, batch), variable)
        if not gradient.isfinite().all():
            raise RequestError("twa: the loss is not a number. Try a smaller rate, or check the data.", keys=("rate",))
        return gradient


def _mixed(models: Sequence[Checkpoint], name: str, shares: Sequence[float]) -> Tensor:
    """Σ a_k W_k of one tensor; integers are the first model's."""
    tensors = [model.read(name) for model in models]
    if not tensors[0].is_floating_point():
        return tensors[0]
    return sum((share * tensor.double() for share, tensor in zip(shares, tensors, strict=True)), torch.zeros(()))
