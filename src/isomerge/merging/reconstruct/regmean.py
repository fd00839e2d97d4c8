"""RegMean++ (Nguyen et al., 2025): RegMean on the inputs that the merged model itself has at each layer.

    W = (Σ_k w_k Ĝ_k)⁻¹ Σ_k w_k Ĝ_k W_k,  Ĝ_k = α G_k + (1 − α) diag(G_k)

with G_k the mean of x xᵀ over the merged model's inputs on the data of model k, and α = `off_diagonal`. Biases, norms
and tables stay averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isomerge.merging.reconstruct.regression import Solved, solve_positive
from isomerge.merging.reconstruct.running import Examples, Routing, Runner, require_finite_rows, rows_of, valid_rows
from isomerge.merging.reconstruct.stages import Stage
from isomerge.merging.reconstruct.walk import FEWEST_FOR_AN_EXPERT, Map, Progress, change_by

Slot = tuple[str, int | None]  # a weight, and which expert of it


class Gram:
    def __init__(self) -> None:
        self.rows, self.sum = 0, torch.zeros(())

    def add(self, inputs: Tensor) -> None:
        x = inputs.double()
        self.rows += x.shape[0]
        self.sum = self.sum.to(x.device) + x.T @ x

    def mean(self, off_diagonal: float) -> Tensor:
        gram = self.sum / max(self.rows, 1)
        return off_diagonal * gram + (1 - off_diagonal) * torch.diag(gram.diagonal())


@dataclass
class RegMeanWalk:
    merged: Runner
    parents: Sequence[nn.Module]
    weights: Sequence[float]
    floor: float
    off_diagonal: float
    told: Progress

    def solve(self, stage: Stage, examples: Sequence[Examples]) -> None:
        """`examples`: the data of each model."""
        if stage.kind == "norm":
            return
        grams: list[dict[Slot, Gram]] = []
        transposed: set[str] = set()
        offset = 0  # the cache tells batches apart by their number
        for own in examples:
            found: dict[Slot, Gram] = {}
            for batch in own:
                routing = Routing(batch) if stage.kind == "experts" else None
                for use in self.merged.run([stage], batch, offset, routing)[stage]:
                    valid = routing.valid(use) if routing else valid_rows(use, batch, self.merged.two_sided)
                    inputs = rows_of(use.input, valid)
                    require_finite_rows(inputs, self.told.roles.label(use.key.name), "the merged model so far")
                    found.setdefault((use.key.name, use.key.part), Gram()).add(inputs)
                    transposed |= {use.key.name} if use.transposed else set()
                offset += 1
            grams.append(found)
        self._put(stage, grams, transposed)

    def _put(self, stage: Stage, grams: list[dict[Slot, Gram]], transposed: set[str]) -> None:
        kept: list[tuple[int, int]] = []
        inputs = 0
        for slot in sorted(set().union(*grams), key=str):
            name, part = slot
            own = [found.get(slot, Gram()) for found in grams]
            rows = min(gram.rows for gram in own)
            if part is not None:
                inputs = self.merged.model.get_parameter(name).shape[2]
                if rows < FEWEST_FOR_AN_EXPERT * inputs:
                    kept.append((part, rows))
                    continue
            means = [w * gram.mean(self.off_diagonal) for w, gram in zip(self.weights, own, strict=True)]
            solved = self._solved(means, name, part, name in transposed)
            if part is None:
                Map(self.merged.model.get_parameter(name), None, name in transposed).add(solved.change)
                self.told.warn_if_few(Stage(stage.kind, (name,), 0, False, stage.place), rows, means[0].shape[0])
            else:
                change_by(self.merged.model.get_parameter(name)[part], solved.change.T)
            more = {} if part is None else {"expert": part}
            self.told.solved(Stage(stage.kind, (name,), 0, False, stage.place), rows, solved, **more)
        self.told.kept(stage, inputs, kept)

    def _solved(self, grams: Sequence[Tensor], name: str, part: int | None, transposed: bool) -> Solved:
        def weight(model: nn.Module) -> Tensor:
            tensor = model.get_parameter(name).detach().double()
            tensor = tensor if part is None else tensor[part]
            return tensor if transposed else tensor.T  # (in, out)

        average = weight(self.merged.model)
        away = [weight(model) - average for model in self.parents]
        total = torch.stack(list(grams)).sum(0)
        cross = torch.stack([gram @ w for gram, w in zip(grams, away, strict=True)]).sum(0)
        change = solve_positive(total + self.floor * total.diagonal().mean() * torch.eye(len(total)).to(total), cross)

        def loss(value: Tensor | float) -> float:
            return sum(float(((w - value) * (g @ (w - value))).sum()) for g, w in zip(grams, away, strict=True))

        size = sum(float(((w + average) * (g @ (w + average))).sum()) for g, w in zip(grams, away, strict=True)) or 1.0
        return Solved(change, (loss(0.0) / size) ** 0.5, (max(loss(change), 0.0) / size) ** 0.5)
