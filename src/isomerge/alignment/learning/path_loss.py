"""How far the predictions of a model on the line are from those of its ends, without labels; or its loss with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isomerge.alignment.learning.path_model import Move, PathModel
from isomerge.data.base import Batch
from isomerge.running.padding import PaddingMask
from isomerge.running.predictions import distance, rows_of


class PathLoss:
    """At share t: the divergence from (1 − t)·(A's probabilities) + t·(B's); squared distance where there are none.

    With `labels`, the loss that the stock class has on those of the data.
    """

    def __init__(self, path: PathModel, *, labels: bool = False) -> None:
        self.path, self.labels = path, labels
        self._ends = [path.end(0), path.end(1)]

    def of(self, batch: Batch, share: float, move: Move | None, *, quick: bool = False) -> Tensor:
        """On one batch; `quick` as in `PathModel.scores`."""
        if self.labels:
            return self.path.loss(self.path.between(share, move), batch, quick=quick)
        with torch.no_grad():
            given = [self.path.scores(weights, batch, quick=quick) for weights in self._ends]
        own = self.path.scores(self.path.between(share, move), batch, quick=quick)
        parts, padding = [], PaddingMask(batch, self.path.module)
        for field, scores in own.items():
            valid = padding.of_side(scores[..., 0].numel(), encoder=False)
            rows, *theirs = (rows_of(one, valid).float() for one in (scores, *(end[field] for end in given)))
            parts.append(distance(self.path.module, field, rows, theirs, (1 - share, share)))
        return torch.stack(parts).sum()

    @torch.no_grad()
    def mean(self, batches: Sequence[Batch], move: Move | None) -> float:
        """At the midpoint."""
        return float(torch.stack([self.of(batch, 0.5, move) for batch in batches]).mean())

    @torch.no_grad()
    def change_at_end(self, batch: Batch, move: Move) -> float:
        """The largest difference between the moved source's scores and its own, relative to the largest score."""
        own = self.path.scores(self._ends[1], batch)
        moved = self.path.scores(self.path.between(1.0, move), batch)
        return max(float((moved[f] - own[f]).abs().max() / own[f].abs().max().clamp_min(1e-30)) for f in own)
