"""Gains that a layer's output passes before anything else reads it: canonical, the layer has them inside.

A branch scale (LayerScale) λ multiplies what a branch adds to the stream: `λ ∘ (W x + b)`. Canonical, W and b have
taken it up and λ is one. A batch norm divides by σ = √(var + ε) and multiplies by γ, so that any factor per unit can
stand in the convolution in front and in the running statistics alike, and a negative one in γ too. Canonical, σ = 1 and
γ > 0.

Both are factors on the first axis of a few tensors, and both are undone by another model's factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from isomerge.symmetry.architecture import BatchNorm, BranchScale
from isomerge.symmetry.binding import BoundModel

Own = Callable[[str], Tensor]  # a tensor of the model whose gauge it is, perhaps as it was stored


class OutputScales:
    """The branch scales and batch norms of the spaces that move, by the tensors they touch."""

    def __init__(self, model: BoundModel, moving: Collection[str]) -> None:
        self.branches: dict[str, BranchScale] = {}
        self.norms: dict[str, BatchNorm] = {}
        self.kept: dict[str, BranchScale | BatchNorm] = {}  # tensors that take this model's own value again
        for gauge in model.architecture.gauges:
            if not isinstance(gauge, BranchScale | BatchNorm) or gauge.writer not in model.layouts:
                continue
            units = model.layouts[gauge.writer].axes[0]
            if not any(atom.space in moving for segment in units for atom in segment.atoms):
                continue
            if isinstance(gauge, BranchScale) and gauge.name in model.layouts:
                bias = model.bias_of(gauge.writer)
                self.branches |= dict.fromkeys([gauge.writer, *([bias] if bias else [])], gauge)
                self.kept[gauge.name] = gauge
            elif isinstance(gauge, BatchNorm):
                self.norms |= dict.fromkeys([gauge.writer, gauge.name + ".running_mean", gauge.name + ".weight"], gauge)
                self.kept[gauge.name + ".running_var"] = gauge

    @property
    def recorded(self) -> list[str]:
        """The tensors whose values are this gauge."""
        return [*self.kept, *(name for name, norm in self.norms.items() if name == norm.name + ".weight")]

    def factor(self, name: str, own: Own) -> Tensor | None:
        """What a tensor is multiplied by on its way to the canonical form; None where nothing."""
        if name in self.branches:
            return own(self.branches[name].name)
        if name not in self.norms:
            return None
        norm = self.norms[name]
        sign = torch.where(own(norm.name + ".weight") < 0, -1.0, 1.0).to(torch.float64)
        if name == norm.name + ".weight":
            return sign
        return sign / (own(norm.name + ".running_var") + norm.eps).sqrt()

    def canonical_value(self, name: str, like: Tensor) -> Tensor:
        """Of a tensor that has no value left: a branch scale of one, a variance that makes σ one."""
        gauge = self.kept[name]
        return torch.full_like(like, 1.0 - gauge.eps if isinstance(gauge, BatchNorm) else 1.0)
