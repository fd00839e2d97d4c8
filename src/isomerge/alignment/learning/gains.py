"""Gains that learn: how a norm in front of its readers shares its size with them.

A gain multiplied by D and the readers' columns divided by D compute the same, for every positive D. The mean of two
such pairs is not the same for every D: (1 + D)/2 · (W_A + W_B/D)/2 = (1 + D)/4 · W_A + (1 + 1/D)/4 · W_B, which adds up
to more than one wherever D ≠ 1. The mean of two models is smaller than either where they disagree; this gives it back.

A gauge, not a group element: it is written with the source as the gains it has, beside those of the anchor.

Readers of a LayerNorm have a mean along the stream that reads nothing, as what the norm gives adds up to zero. Times
gains that differ it does not, and the mean of two models reads it. So both ends have the anchor's means here, as their
files do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.canonical import Canonical, Fold
from isomerge.symmetry.transform import Transform


class LearnedGains:
    """One positive factor per unit of every norm that the anchor's canonical form folds."""

    def __init__(self, canonical: Canonical, balance: Transform, device: str) -> None:
        self._layouts = canonical.model.layouts
        record, readers = canonical.record(), sorted(canonical.centred_readers)
        wide = {r: record[f"mean:{r}"].cpu().expand(self._layouts[r].shape) for r in readers}
        self.means = {r: balance.act(wide[r], self._layouts[r]).to(device) for r in readers}
        self.folds: dict[str, Fold] = {fold.norm.name: fold for fold in canonical.folds}
        self.parameters = {
            name: torch.zeros(self._layouts[f"{name}.weight"].shape, device=device).requires_grad_()
            for name in self.folds
        }
        self._norm_of = {reader: name for name, fold in self.folds.items() for reader in fold.readers}

    def factors(self) -> dict[str, Tensor]:
        return {name: value.exp() for name, value in self.parameters.items()}

    @torch.no_grad()
    def exact(self) -> dict[str, Tensor]:
        """In float64, on the CPU."""
        return {name: value.detach().cpu().double().exp() for name, value in self.parameters.items()}

    def act(self, name: str, tensor: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """A tensor of a canonical model with these gains."""
        if name in self._norm_of:
            axis = self._layouts[name].axis_of(RESIDUAL, dual=True)
            factor = factors[self._norm_of[name]].reshape([-1 if k == axis else 1 for k in range(tensor.ndim)])
            return (tensor + self.means[name].to(tensor) if name in self.means else tensor) / factor
        norm, _, kind = name.rpartition(".")
        if norm not in self.folds:
            return tensor
        if kind == "weight":
            return factors[norm] - self.folds[norm].norm.offset
        return tensor if self.folds[norm].bias_too else tensor * factors[norm]

    def gauge(self, record: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The anchor's gauge with these gains in place of its own, on the CPU."""
        changed = {key: value.cpu() for key, value in record.items()}
        for norm, factor in self.exact().items():
            key, offset = f"value:{norm}.weight", self.folds[norm].norm.offset
            changed[key] = (changed[key] + offset) * factor - offset
        return changed
