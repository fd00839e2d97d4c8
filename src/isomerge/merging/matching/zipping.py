"""The greedy zip of ZipIt: the two units of highest correlation become one, in a model or across, until few are left.

With S the correlations of all units of all models, and α = `repeats`:

    (i, j) = argmax S;   S_i ← α · min(S_i, S_j), entry by entry, row and column;   j is gone

so a unit that was zipped may be zipped again, at a price. At most `within` of the zips that a model has to give may be
of two units of its own. Where these two rules leave no pair, the smallest correlation between groups decides alone.

Reference: Stoica et al., "ZipIt! Merging Models from Different Tasks without Training" (ICLR 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -torch.inf


def zip_units(correlation: Tensor, owners: Tensor, keep: int, *, repeats: float, within: float) -> list[list[int]]:
    """Groups of units, `keep` in number, sorted by their first; `owners` says whose each unit is.

    >>> S = torch.tensor([[1.0, 0.2, 0.9, 0.1], [0.2, 1.0, 0.3, 0.8], [0.9, 0.3, 1.0, 0.0], [0.1, 0.8, 0.0, 1.0]])
    >>> zip_units(S, torch.tensor([0, 0, 1, 1]), 2, repeats=0.3, within=1.0)
    [[0, 2], [1, 3]]
    """
    zipper = Zipper.of(correlation.double().cpu(), owners.cpu(), keep, repeats, within)
    while len(zipper.groups) > keep:
        zipper.step()
    return sorted(sorted(group) for group in zipper.groups.values())


@dataclass
class Zipper:
    """The units that are left, by the place of the first of each group."""

    groups: dict[int, list[int]]
    allowed: Tensor
    """S where a zip is allowed, else minus infinity."""
    plain: Tensor
    """The smallest correlation between two groups, whatever is allowed."""
    owner: Tensor
    budget: list[int]
    """How many units of its own each model may still zip."""
    repeats: float

    @classmethod
    def of(cls, correlation: Tensor, owners: Tensor, keep: int, repeats: float, within: float) -> Zipper:
        count, models = len(correlation), int(owners.max()) + 1
        plain = correlation.clone().fill_diagonal_(NEVER)
        budget = [int(within * ((count - keep) // models) + 1e-9)] * models
        return cls({k: [k] for k in range(count)}, plain.clone(), plain, owners, budget, repeats)

    def __post_init__(self) -> None:
        for model in range(len(self.budget)):
            self._forbid_if_spent(model)
        self.best, self.partner = self.allowed.max(1)
        """Of every row, so that a step need not look at all pairs."""

    def step(self) -> None:
        """Zip the best pair; the first of the two stays."""
        i = int(self.best.argmax())
        j = int(self.partner[i])
        if self.best[i] == NEVER:
            i, j = divmod(int(self.plain.argmax()), len(self.plain))
        i, j = min(i, j), max(i, j)
        self.groups[i] += self.groups.pop(j)
        _join(self.plain, i, j, 1.0)
        _join(self.allowed, i, j, self.repeats)
        changed = (self.partner == i) | (self.partner == j) | (self.allowed[i] > self.best)
        changed[[i, j]] = True
        if self.owner[i] == self.owner[j]:
            self.budget[int(self.owner[i])] -= 1
            changed |= self._forbid_if_spent(int(self.owner[i]))
        self.best[changed], self.partner[changed] = self.allowed[changed].max(1)

    def _forbid_if_spent(self, model: int) -> Tensor:
        """Which rows this changes."""
        own = (self.owner == model) & (self.budget[model] <= 0)
        if bool(own.any()):
            self.allowed[own[:, None] & own] = NEVER
        return own


def _join(scores: Tensor, i: int, j: int, factor: float) -> None:
    row = torch.minimum(scores[i], scores[j])
    row = row * factor if factor > 0 else torch.full_like(row, NEVER)
    row[[i, j]] = NEVER
    scores[i], scores[:, i] = row, row
    scores[j], scores[:, j] = NEVER, NEVER
