"""The output map, fitted to the parents' predictions: a convex problem once everything below it is solved.

    min over A of mean[logsumexp(Z A) − p · Z A] + pull ‖A − A₀‖²,  Z = F L⁻ᵀ,  FᵀF / N + damping · mean diag · 1 = L Lᵀ

F are the features that the map reads in the merged model, p what the parents predict, each as far as it is believed,
and A₀ the map in place. A squared error of scores counts a class nobody expects as much as the one that comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.solver import LinearWeight
from isomerge.merging.layerwise.stage_runner import StageRunner, rows_of
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.blocks import BlockCache, BlockStacks
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass

DAMPING = 1e-4
PULL = 1e-4
STEPS = 25
BLOCK, SCORES = 2048, 2**26  # rows of scores at a time, and scores
HISTORY = 5  # steps that are remembered, each the size of the map


@dataclass
class Features:
    """What an output map reads in one model: (rows, in), with a column of ones where the map has a bias."""

    rows: Tensor
    weight: Tensor  # (in, out)

    def scores(self, start: int, stop: int) -> Tensor:
        return self.rows[start:stop] @ self.weight


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
    block = max(64, min(BLOCK, SCORES // features[0].weight.shape[1]))
    own, others = features[0], features[1:]
    count, device = len(own.rows), own.rows.device
    gram = torch.zeros(own.rows.shape[1], own.rows.shape[1], dtype=torch.float64, device=device)
    for rows in own.rows.split(BLOCK):
        gram.addmm_(rows.double().T, rows.double())
    gram /= count
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    factor = torch.linalg.cholesky(gram)
    white = torch.cat([
        torch.linalg.solve_triangular(factor, rows.double().T, upper=False).T.to(own.rows.dtype)
        for rows in own.rows.split(BLOCK)
    ])  # fmt: skip
    start = (factor.T @ own.weight.double()).to(own.rows.dtype)
    change = torch.zeros_like(start, requires_grad=True)

    def objective(*, gradient: bool) -> float:
        total = 0.0
        for at in range(0, count, block):
            stop = min(count, at + block)
            with torch.no_grad():
                target = torch.zeros(())
                for m, other in enumerate(others):
                    share = shares[m] if believed is None else believed[m, at:stop, None].to(own.rows)
                    part = other.scores(at, stop).softmax(-1) * share
                    target = part if m == 0 else target + part
                entropy = torch.special.entr(target).sum()
            with torch.set_grad_enabled(gradient):
                scores = white[at:stop] @ (start + change)
                loss = (scores.logsumexp(-1) - (target * scores).sum(-1)).sum() / count
                if gradient:
                    loss.backward()
            total += float(loss.detach()) - float(entropy) / count
        with torch.set_grad_enabled(gradient):
            pull = PULL * change.square().sum()
            if gradient:
                pull.backward()
        return total if not gradient else total + float(pull.detach())

    before = objective(gradient=False)
    optimiser = torch.optim.LBFGS([change], max_iter=STEPS, history_size=HISTORY, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        with torch.enable_grad():
            return objective(gradient=True)

    optimiser.step(closure)
    after = objective(gradient=False)
    if after < before:
        solution = torch.linalg.solve_triangular(factor.T, change.detach().double(), upper=True)
        map_ = LinearWeight.of(merged.model, stage.names[0])
        map_.transposed = transposed
        width = map_.sizes[0]
        map_.add(solution[:width], solution[width] if map_.bias is not None else None)
    return {"steps": STEPS, "loss_before": before, "loss_after": min(before, after)}


def _collect(
    runners: Sequence[StageRunner], stage: Stage, data: GoalData, budget: int
) -> tuple[list[Features], Tensor | None, bool]:
    """What each model's map reads, who is believed there, and which way round the weight is stored. Batches are taken
    evenly over the data, as many as `budget` bytes hold, and at least one."""
    rows: list[list[Tensor]] = [[] for _ in runners]
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
            transposed = call.transposed
            if who == 0:
                believed.append(data.believed(number, call.rows, valid))
        if number == 0:
            held = sum(own[0].nbytes for own in rows)
            every = math.ceil(total / max(1, min(total, budget // max(1, held))))
    features = []
    for runner, own in zip(runners, rows, strict=True):
        map_ = LinearWeight.of(runner.model, stage.names[0])
        weight = map_.weight.detach() if transposed else map_.weight.detach().T
        inputs = torch.cat(own)
        if map_.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
            weight = torch.cat([weight, map_.bias.detach()[None]])
        features.append(Features(inputs, weight.to(inputs)))
    kept = [part for part in believed if part is not None]
    return features, torch.cat(kept, 1) if kept else None, transposed


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
