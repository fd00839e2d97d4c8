"""Inputs with noise, or moved where they hurt: a path that is trained and measured so is robust (Zhao et al. 2020,
arXiv 2005.00060).

Pixels and other numbers are changed themselves; for tokens it is what the input embedding gives. Sizes are relative to
the standard deviation of what is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.running.predictions import scores_in
from isomerge.running.stock import inputs_of

Runs = Callable[[Batch], Any]
Change = Callable[[Tensor], Tensor]


class Perturbation:
    """`noise`: x + size · σ(x) · N(0, 1), drawn anew for every batch.

    `attack`: x + size · σ(x) · sign ∇ₓ of the loss of the class that the model itself finds likeliest, so that no label
    is needed or given away (the fast gradient sign method; Kurakin et al. 2017 on labels).
    """

    def __init__(self, kind: Literal["noise", "attack"], size: float, seed: int) -> None:
        self.kind, self.size, self.seed = kind, size, seed
        self.start_again()

    def start_again(self) -> None:
        """Draw the same noise once more."""
        self._draw = torch.Generator().manual_seed(self.seed & (2**63 - 1))

    def run(self, module: Any, batch: Batch, run: Runs) -> Any:
        """The outputs for one perturbed batch. `run` is the module with the weights that it should have."""
        if self.kind == "noise":
            return _changed(module, batch, run, self._noise)
        signs = iter(self._worst_signs(module, batch, run))
        return _changed(module, batch, run, lambda x: x + self.size * x.detach().std() * next(signs))

    def of(self, module: Any) -> PerturbedModule:
        """The module as one that perturbs its own inputs, with noise from the start."""
        self.start_again()
        return PerturbedModule(module, self)

    def _noise(self, x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=self._draw).to(x)
        return x + self.size * x.detach().std() * drawn

    def _worst_signs(self, module: Any, batch: Batch, run: Runs) -> list[Tensor]:
        moves: list[Tensor] = []

        def watched(x: Tensor) -> Tensor:
            moves.append(torch.zeros_like(x).requires_grad_())
            return x.detach() + moves[-1]

        with torch.enable_grad():
            scores = scores_in(_changed(module, inputs_of(batch, module), run, watched))
            rows = [one.reshape(-1, one.shape[-1]) for field, one in scores.items() if field != "hidden"]
            if not rows or min(one.shape[-1] for one in rows) < 2:
                raise RequestError(
                    "Attacking inputs: the model has no scores of classes or tokens to attack. Use noise.",
                    keys=("attack",),
                )
            loss = torch.stack([F.cross_entropy(one, one.argmax(-1)) for one in rows]).sum()
            return [gradient.sign() for gradient in torch.autograd.grad(loss, moves)]


class PerturbedModule:
    """What a measure runs in the place of the module."""

    def __init__(self, module: Any, perturbation: Perturbation) -> None:
        self._module, self._perturbation = module, perturbation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, **inputs: Tensor) -> Any:
        return self._perturbation.run(self._module, inputs, lambda batch: self._module(**batch))


def _changed(module: Any, batch: Batch, run: Runs, change: Change) -> Any:
    numbers = next((name for name, x in batch.items() if x.is_floating_point() and x.dim() > 2), None)
    if numbers is not None:
        return run({**batch, numbers: change(batch[numbers])})
    with module.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: change(output)):
        return run(batch)
