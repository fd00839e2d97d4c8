"""The output map, fitted to the parents' predictions: a convex problem once everything below it is solved.

    min over A of mean[logsumexp(Z A) − p · Z A] + pull ‖A − A₀‖²,  Z = F L⁻ᵀ,  FᵀF / N + damping · mean diag · 1 = L Lᵀ

F are the features that the map reads in the merged model, p what the parents predict, each as far as it is believed,
and A₀ the map in place. A squared error of scores counts a class nobody expects as much as the one that comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isomerge.merging.layerwise.assembly import sum_of
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.ridge import ASIDE
from isomerge.merging.layerwise.solver import LinearWeight
from isomerge.merging.layerwise.stage_runner import StageRunner
from isomerge.merging.layerwise.stages import Stage
from isomerge.merging.layerwise.token_matching import TokenMatch
from isomerge.running.blocks import BlockCache, BlockStacks
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of

DAMPING = 1e-4
PULL = 1e-4
FEW = 20  # rows per input below which the pull is chosen on rows that are kept aside
PULLS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STEPS = 25
BLOCK, SCORES = 2048, 2**26  # rows of scores at a time, and scores
HISTORY = 5  # steps that are remembered, each the size of the map


@dataclass
class Features:
    """What an output map reads in one model: (rows, in), with a column of ones where the map has a bias."""

    rows: Tensor
    weight: Tensor  # (in, out)
    tokens: TokenMatch | None = None
    pending: Tensor | None = None
    """Of a model with another vocabulary than the first."""

    def predictions(self, rows: Tensor, first: Features) -> Tensor:
        own = (self.rows[rows] @ self.weight).softmax(-1)
        if self.tokens is None or self.pending is None:
            return own
        return self.tokens.carried(own, first.predictions(rows, first), self.pending[rows])


def fit_output(
    merged: StageRunner,
    parents: Sequence[StageRunner],
    stage: Stage,
    data: GoalData,
    shares: Sequence[float],
    budget: int,
) -> dict[str, Any]:
    """Put the fitted map into the merged model. Reported is the distance to the predictions, in nats per row."""
    features, believed, transposed = _collect([merged, *parents], stage, data, budget)
    own = features[0].rows
    gram = torch.zeros(own.shape[1], own.shape[1], dtype=torch.float64, device=own.device)
    for rows in own.split(BLOCK):
        gram.addmm_(rows.double().T, rows.double())
    gram /= len(own)
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram)
    white = torch.cat([
        torch.linalg.solve_triangular(factor, rows.double().T, upper=False).T.to(own.dtype)
        for rows in own.split(BLOCK)
    ])  # fmt: skip
    start = (factor.T @ features[0].weight.double()).to(own.dtype)
    problem = ConvexFit(white, start, features[1:], shares, believed)
    every = torch.arange(len(own), device=own.device)
    pull = problem.best_pull(every) if len(own) < FEW * own.shape[1] else PULL
    before, change = problem.distance(torch.zeros_like(start), every), problem.fit(every, pull)
    after = problem.distance(change, every)
    if after < before:
        solution = torch.linalg.solve_triangular(factor.T, change.double(), upper=True)
        map_ = LinearWeight.of(merged.model, stage.names[0])
        map_.transposed = transposed
        width = map_.sizes[0]
        map_.add(solution[:width], solution[width] if map_.bias is not None else None)
    return {"steps": STEPS, "pull": pull, "loss_before": before, "loss_after": min(before, after)}


@dataclass
class ConvexFit:
    """The problem above, on any of its rows."""

    white: Tensor  # Z
    start: Tensor  # A₀
    parents: Sequence[Features]
    shares: Sequence[float]
    believed: Tensor | None  # (parents, rows)

    def predicted(self, rows: Tensor) -> Tensor:
        """What the parents predict, each as far as it is believed."""
        return self._predicted(rows) if self._known is None else self._known[rows]

    @cached_property
    def _known(self) -> Tensor | None:
        """All predictions, where it takes long to carry them from another vocabulary and there is room."""
        small = len(self.white) * self.start.shape[1] <= SCORES
        if not small or all(one.tokens is None for one in self.parents):
            return None
        return torch.cat(
            [self._predicted(some) for some in self._blocks(torch.arange(len(self.white), device=self.white.device))]
        )

    @torch.no_grad()
    def _predicted(self, rows: Tensor) -> Tensor:
        """Who is not believed, is not asked."""
        first = self.parents[0]
        if self.believed is None:
            return sum_of(
                one.predictions(rows, first) * share for one, share in zip(self.parents, self.shares, strict=True)
            )
        target = torch.zeros(len(rows), self.start.shape[1], dtype=self.start.dtype, device=self.start.device)
        for one, share in zip(self.parents, self.believed[:, rows], strict=True):
            at = share.nonzero()[:, 0]
            target[at] += one.predictions(rows[at], first) * share[at, None].to(target)
        return target

    @torch.no_grad()
    def distance(self, change: Tensor, rows: Tensor) -> float:
        """From the predictions, in the mean over some rows."""
        total = 0.0
        for some in self._blocks(rows):
            target = self.predicted(some)
            entropy = torch.special.entr(target).sum()
            total += float(self._cross_entropy(target, some, change) - entropy)
        return total / len(rows)

    def fit(self, rows: Tensor, pull: float) -> Tensor:
        """A − A₀, from some rows."""
        change = torch.zeros_like(self.start, requires_grad=True)
        optimiser = torch.optim.LBFGS([change], max_iter=STEPS, history_size=HISTORY, line_search_fn="strong_wolfe")

        @torch.enable_grad()
        def closure() -> float:
            optimiser.zero_grad()
            total = 0.0
            for some in self._blocks(rows):
                loss = self._cross_entropy(self.predicted(some), some, change) / len(rows)
                loss.backward()
                total += float(loss.detach())
            penalty = pull * change.square().sum()
            penalty.backward()
            return total + float(penalty.detach())

        optimiser.step(closure)
        return change.detach()

    def best_pull(self, rows: Tensor) -> float:
        """What predicts rows best that were not fitted, one of ASIDE."""
        aside = rows % ASIDE == ASIDE - 1
        if not bool(aside.any()):
            return PULLS[-1]
        return min(PULLS, key=lambda pull: finite(self.distance(self.fit(rows[~aside], pull), rows[aside])))

    def _cross_entropy(self, target: Tensor, rows: Tensor, change: Tensor) -> Tensor:
        scores = self.white[rows] @ (self.start + change)
        return (scores.logsumexp(-1) - (target * scores).sum(-1)).sum()

    def _blocks(self, rows: Tensor) -> Iterator[Tensor]:
        size = max(64, min(BLOCK, SCORES // self.start.shape[1]))
        return (rows[at : at + size] for at in range(0, len(rows), size))


def _collect(
    runners: Sequence[StageRunner], stage: Stage, data: GoalData, budget: int
) -> tuple[list[Features], Tensor | None, bool]:
    """What each model's map reads, who is believed there, and which way round the weight is stored. Batches are taken
    evenly over the data, as many as `budget` bytes hold, and at least one."""
    rows: list[list[Tensor]] = [[] for _ in runners]
    pending: list[list[Tensor]] = [[] for _ in runners]
    total, every = data.examples.count or 1, 1
    believed = []
    transposed = False
    for number, batch in enumerate(data.examples):
        if number % every:
            continue
        padding = PaddingMask(batch, runners[0].model)
        for who, runner in enumerate(runners):
            (call,) = runner.run([stage], batch, number)[stage]
            valid = padding.of_side(call.rows, encoder=call.encoded)
            rows[who].append(rows_of(call.input, valid))
            if runner.tokens.match is not None:
                pending[who].append(rows_of(runner.tokens.pending(batch)[:, None], valid)[:, 0])
            transposed = call.transposed
            if who == 0:
                believed.append(data.believed(number, call.rows, valid))
        if number == 0:
            held = sum(own[0].nbytes for own in rows)
            every = math.ceil(total / max(1, min(total, budget // max(1, held))))
    features = []
    for runner, own, left in zip(runners, rows, pending, strict=True):
        map_ = LinearWeight.of(runner.model, stage.names[0])
        weight = map_.weight.detach() if transposed else map_.weight.detach().T
        inputs = torch.cat(own)
        if map_.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
            weight = torch.cat([weight, map_.bias.detach()[None]])
        tokens = runner.tokens.match
        features.append(Features(inputs, weight.to(inputs), tokens, torch.cat(left) if tokens is not None else None))
    kept = [part for part in believed if part is not None]
    return features, torch.cat(kept, 1) if kept else None, transposed


def finite(loss: float) -> float:
    """For comparing: what is not a number is worse than any."""
    return loss if math.isfinite(loss) else math.inf


def output_stage(model: Any, stages: Sequence[Stage], examples: DataPass) -> Stage | None:
    """The stage whose one map gives the scores of classes or tokens, as they are; None where there is none: where the
    map is tied, or its output is scaled, capped or picked from before it is the model's."""
    last, few = stages[-1] if stages else None, examples.first()
    if last is None or last.kind != "inputs" or len(last.names) != 1 or last.calls != 1:
        return None
    if getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification"):
        return None
    with torch.no_grad():
        scores = getattr(model(**few), "logits", None)
    (call,) = StageRunner(model, "the model", 0, BlockCache(BlockStacks(), 0)).run([last], few, 0)[last]
    same = scores is not None and call.output.shape == scores.shape and torch.allclose(call.output, scores, rtol=1e-4)
    return last if same and call.output.shape[-1] > 1 else None
