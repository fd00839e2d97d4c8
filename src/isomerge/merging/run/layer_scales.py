"""LARV: how much of each model's change counts in each layer, before any method merges what is left.

For a layer of a model, W₀ being a matrix of the base and τ its change, averaged over the layer's matrices:

    e = r(W₀) / r(τ),  r(A) = exp(−Σ p log p) with p = σ² / Σ σ²        how concentrated the change is
    c = ½ (‖W₀τᵀ − τW₀ᵀ‖ + ‖W₀ᵀτ − τᵀW₀‖) / (‖W₀‖ ‖τ‖)                 how much it turns the base
    g = e √(ℓ / L) / (1 + softplus(c̃)),  c̃ = (c − mean c) / std c over the layers
    s = 1 + ½ tanh(3 (g − 1))

The paper is arXiv 2602.09413. Three things are chosen here, as its text could not be had: the mean over a layer's
matrices, that each model's own change is looked at and not their sum, and the continuous scale, although the paper
prefers scales of two or three fixed sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.kinship import place_of
from isomerge.merging.methods.singular_vectors import is_linear_map
from isomerge.merging.methods.task_vectors import task_vectors
from isomerge.merging.run.rows import TensorGroup, TensorSource

SHARPNESS = 3.0
TINY = 1e-10
Layer = tuple[str, int]
"""The stack and the number of a layer."""


@dataclass
class LayerScales:
    """One factor for each model in each layer. All are computed when the first is asked for."""

    matrices: Mapping[str, tuple[Sequence[TensorSource], TensorSource]]
    """By name, the models' and the base's."""
    device: str = "cpu"
    _known: dict[Layer, list[float]] | None = None
    _lock: Any = field(default_factory=threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.Lock()}

    def of(self, name: str) -> list[float]:
        """Of a tensor: its layer's, for each model; nothing for what is outside the layers."""
        with self._lock:
            if self._known is None:
                self._known = self._computed()
            return self._known.get(place_of(name)[:2], [])

    def _computed(self) -> dict[Layer, list[float]]:
        measured: dict[Layer, list[Tensor]] = {}
        for name, (models, base) in self.matrices.items():
            group = TensorGroup(name, models, base, device=self.device)
            layer = place_of(name)[:2]
            if layer[1] >= 0 and is_linear_map(group):
                measured.setdefault(layer, []).append(_measured(group))
            for source in (*models, base):
                if hasattr(source, "release"):  # what was computed for this look is not held for all tensors at once
                    source.release()
        return _scales({layer: torch.stack(found).mean(0) for layer, found in measured.items()})


def _measured(group: TensorGroup) -> Tensor:
    """(2, models): e and c."""
    block = group.whole()
    assert block.base is not None
    base = block.base.reshape(group.shape[0], -1).double()
    richness = _effective_rank(base)
    found = []
    for vector in task_vectors(block).reshape(group.models, *base.shape).double():
        lengths = base.norm() * vector.norm() + TINY
        outputs, inputs = base @ vector.T, base.T @ vector
        conflict = ((outputs - outputs.T).norm() + (inputs - inputs.T).norm()) / (2 * lengths)
        found.append(torch.stack([richness / _effective_rank(vector), conflict]))
    return torch.stack(found, dim=1).cpu()


def _effective_rank(matrix: Tensor) -> Tensor:
    """From 1, for a matrix of rank 1 or none, to its smaller side."""
    energies = torch.linalg.svdvals(matrix).square()
    shares = energies / energies.sum() if energies.any() else energies
    rank: Tensor = torch.special.entr(shares).sum().exp()
    return rank


def _scales(measured: Mapping[Layer, Tensor]) -> dict[Layer, list[float]]:
    scales: dict[Layer, list[float]] = {}
    for stack in dict.fromkeys(stack for stack, _ in measured):
        layers = sorted(layer for layer in measured if layer[0] == stack)
        contrast, conflict = torch.stack([measured[layer] for layer in layers]).unbind(1)  # (layers, models)
        spread = conflict.std(0, correction=0)
        standard = (conflict - conflict.mean(0)) / torch.where(spread > TINY, spread, 1.0)
        depth = torch.arange(1, len(layers) + 1, dtype=contrast.dtype)[:, None] / len(layers)
        score = contrast * depth.sqrt() / (1 + torch.nn.functional.softplus(standard))
        for layer, row in zip(layers, 1 + 0.5 * (SHARPNESS * (score - 1)).tanh(), strict=True):
            scales[layer] = row.tolist()
    return scales
