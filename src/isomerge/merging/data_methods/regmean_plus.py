"""RegMean++ (Nguyen et al., 2025): RegMean on the inputs that the merged model itself has at each layer.

    W = (Σ_k w_k Ĝ_k)⁻¹ Σ_k w_k Ĝ_k W_k,  Ĝ_k = α G_k + (1 − α) diag(G_k)

with G_k the mean of x xᵀ over the merged model's inputs on the data of model k or, with expert goals, over all data,
each example by how much model k is believed on it. Biases, norms and tables stay averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.arguments import require_choice
from isomerge.errors import RequestError
from isomerge.merging.data_methods.method import data_method
from isomerge.merging.layerwise.goals import Beliefs, expert_beliefs, require_evidence
from isomerge.merging.layerwise.kept_stages import KeptStages, owners_of
from isomerge.merging.layerwise.layerwise_merge import LayerwiseMerge
from isomerge.merging.layerwise.ridge import RegressionResult, solve_positive
from isomerge.merging.layerwise.solver import FEWEST_FOR_AN_EXPERT, LayerReport, LinearWeight, change_by
from isomerge.merging.layerwise.stage_runner import ExpertRouting, StageRunner, require_finite_rows
from isomerge.merging.layerwise.stages import Stage
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import PerModel, Share, each
from isomerge.running.gram import GramSums
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of

Slot = tuple[str, int | None]  # a weight, and which expert of it


@data_method(
    name="regmean++",
    data="each",
    passes="the merged model over every model's data, once per linear map",
    reference="https://arxiv.org/abs/2508.03121",
    old_options={"off_diagonal": "alpha"},
)
def regmean_plus(
    inputs: MergeInputs,
    *,
    weight: PerModel[float] = each(1.0),
    goals: str = "own",
    temperature: float = 1.0,
    alpha: Share = 0.9,
    floor: float = 1e-6,
    cache: str = "2GB",
) -> MergedWeights:
    """As regmean, layer after layer, with the inputs that the merged model has on each model's own data.

    Options:
        weight: how much each model's data count, divided by their sum
        goals: whose inputs count: each model's on its own data, or on all data together those of the expert, the model that finds an example likely or is sure of its answer
        temperature: of the expert's posterior; more lets others speak, too
        alpha: what off-diagonal entries of the Gram matrices are multiplied by (earlier name: off_diagonal)
        floor: what is added to their diagonal, as a share of its mean
        cache: memory that spares running finished layers again, as 2GB; 0 switches it off
    """  # noqa: E501
    _check(goals, temperature)
    run = LayerwiseMerge(inputs, weight, [data.passes(inputs.models[0]) for data in inputs.data], cache)
    beliefs = None
    record: dict[str, Any] = {}
    if goals == "expert":
        require_evidence(run.others[0], run.examples[0], "regmean++", "own goals")
        beliefs = [expert_beliefs(data, run.others, run.shares, temperature)[0] for data in run.examples]
        totals = zip(*(own.totals() for own in beliefs), strict=True)
        record["goals"] = {"kind": "expert", "examples": [sum(counts) for counts in totals]}
    solver = RegMeanSolver(run.runners()[0], run.others, run.shares, floor, alpha, run.report, run.plan.stages, beliefs)
    kept = KeptStages(run, run.examples)
    for number, stage in enumerate(run.plan.stages):
        if kept.restore(f"stage-{number}") is None:
            solver.solve(stage, run.examples)
            kept.store(f"stage-{number}", owners_of(stage))
        inputs.report(number + 1, len(run.plan.stages), "reconstructing")
    return run.result(record)


def _check(goals: str, temperature: float) -> None:
    if goals == "mean":
        raise RequestError(
            "regmean++: with mean goals all models count alike on all data, and the solution is the plain average. Use "
            "own or expert goals.",
            keys=("goals",),
        )
    require_choice("goals", goals, ("own", "expert"))
    if not temperature > 0:
        raise RequestError(f"regmean++: temperature is {temperature}; it is a number above 0.", keys=("temperature",))


@dataclass
class RegMeanSolver:
    merged: StageRunner
    parents: Sequence[nn.Module]
    weights: Sequence[float]
    floor: float
    alpha: float
    report: LayerReport
    stages: Sequence[Stage]
    beliefs: Sequence[Beliefs] | None
    """Of each data set, where it is not its model's alone."""

    def solve(self, stage: Stage, examples: Sequence[DataPass]) -> None:
        """`examples`: the data of each model."""
        if stage.kind == "norm":
            return
        grams: list[dict[Slot, GramSums]] = [{} for _ in self.parents]
        transposed: set[str] = set()
        offset = 0  # the cache tells batches apart by their number
        for model, own in enumerate(examples):
            for place, batch in enumerate(own):
                padding = PaddingMask(batch, self.merged.model)
                routing = ExpertRouting(batch) if stage.kind == "experts" else None
                calls = self.merged.run([stage], batch, offset, routing)[stage]
                tokens: dict[int, Tensor] = {}
                if routing and self.beliefs:
                    tokens = routing.tokens_of(self.merged, self.stages, stage, batch, offset)
                for call in calls:
                    valid = routing.valid(call) if routing else padding.of_side(call.rows, encoder=call.encoded)
                    inputs = rows_of(call.input, valid)
                    require_finite_rows(inputs, self.report.roles.label(call.weight), "the merged model so far")
                    slot = (call.weight, call.expert)
                    transposed |= {call.weight} if call.transposed else set()
                    if self.beliefs is None:
                        grams[model].setdefault(slot, GramSums()).add(inputs)
                        continue
                    if routing:
                        at = rows_of(tokens[call.expert or 0][:, None], valid)[:, 0]
                        believed = self.beliefs[model].rows(place, routing.tokens)[:, at]
                    else:
                        believed = self.beliefs[model].rows(place, call.rows, valid)
                    for sums, share in zip(grams, believed, strict=True):
                        sums.setdefault(slot, GramSums()).add(inputs * share.sqrt().to(inputs)[:, None])
                offset += 1
        self._put(stage, grams, transposed)

    def _put(self, stage: Stage, grams: list[dict[Slot, GramSums]], transposed: set[str]) -> None:
        kept: list[tuple[int, int]] = []
        inputs = 0
        for slot in sorted(set().union(*grams), key=str):
            name, part = slot
            width = next(one[slot].total.numel() for one in grams if slot in one)
            own = [one.get(slot, GramSums(width)) for one in grams]
            rows = min(sums.count for sums in own)
            if part is not None:
                inputs = self.merged.model.get_parameter(name).shape[2]
                if rows < FEWEST_FOR_AN_EXPERT * inputs:
                    kept.append((part, rows))
                    continue
            means = [w * self._mean(sums) for w, sums in zip(self.weights, own, strict=True)]
            solved = self._solved(means, name, part, name in transposed)
            if part is None:
                LinearWeight(self.merged.model.get_parameter(name), None, name in transposed).add(solved.change)
                self.report.warn_if_few(Stage(stage.kind, (name,), 0, False, stage.place), rows, means[0].shape[0])
            else:
                change_by(self.merged.model.get_parameter(name)[part], solved.change.T)
            more = {} if part is None else {"expert": part}
            self.report.solved(Stage(stage.kind, (name,), 0, False, stage.place), rows, solved, **more)
        self.report.kept(stage, inputs, kept)

    def _mean(self, sums: GramSums) -> Tensor:
        """Ĝ."""
        gram = sums.product / max(sums.count, 1)
        return self.alpha * gram + (1 - self.alpha) * torch.diag(gram.diagonal())

    def _solved(self, grams: Sequence[Tensor], name: str, part: int | None, transposed: bool) -> RegressionResult:
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
        return RegressionResult(change, (loss(0.0) / size) ** 0.5, (max(loss(change), 0.0) / size) ** 0.5, 0.0)
