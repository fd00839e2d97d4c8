"""For each stage: run the models, sum up, solve, and put the result into the merged model before going on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.data.base import Batch
from isomerge.merging.layerwise.assembly import FeatureAssembly
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.ridge import (
    RIDGE,
    GainRegression,
    OwnedRegression,
    RegressionResult,
    RidgeRegression,
    RidgeSearch,
    solve_regression,
)
from isomerge.merging.layerwise.roles import ParameterRoles
from isomerge.merging.layerwise.stage_runner import ExpertRouting, StageRunner, require_finite_rows
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.call_recorder import WeightCall
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of

FEW = 4  # rows per input below which a regression is warned about
FEWEST_FOR_AN_EXPERT = 10  # … below which an expert keeps the average


@dataclass(frozen=True)
class StageRows:
    """The n-th call of every map of a stage on one batch, without its padding."""

    calls: list[WeightCall]  # of the merged model
    inputs: list[Tensor]  # (rows, in) each
    outputs: list[Tensor]
    outcomes: list[Tensor]  # the output, or the sum it goes into
    targets: list[Tensor]  # the weighted mean of the parents' outcomes
    believed: Tensor | None  # (parents, rows)


@dataclass
class LayerReport:
    """What was solved, and what there is to warn of."""

    roles: ParameterRoles
    layers: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def solved(self, stage: Stage, rows: int, solved: RegressionResult, **more: Any) -> None:
        names = [self.roles.label(name) for name in stage.names]
        residuals = {"residual_before": solved.before, "residual_after": solved.after}
        self.layers.append({"layers": names, "kind": stage.kind, "samples": rows, **residuals, **more})

    def warn_if_few(self, stage: Stage, rows: int, inputs: int) -> None:
        if rows < FEW * inputs:
            self.warnings.append(
                f"{self.roles.label(stage.names[0])}: {rows} samples for {inputs} inputs; {FEW * inputs} or more are "
                "better. With fewer the result leans on the ridge, which keeps it near the average."
            )

    def kept(self, stage: Stage, inputs: int, kept: Sequence[tuple[int, int]]) -> None:
        """Experts (number, tokens) that stay as they are."""
        if kept:
            named = ", ".join(f"{part} ({rows} tokens)" for part, rows in kept[:8])
            more = f" and {len(kept) - 8} more" if len(kept) > 8 else ""
            self.warnings.append(
                f"{self.roles.label(stage.names[0])}: experts {named}{more} keep the average; each needs "
                f"{FEWEST_FOR_AN_EXPERT * inputs} tokens, {FEWEST_FOR_AN_EXPERT} per input. Give more calibration data."
            )


@dataclass
class LayerTargets:
    """What a stage is solved towards: the parents' outcomes, put together as the assembly says (usually their mean).

    The parents do not change, so one pass over a block can note the targets of all its stages; those that are not due
    yet are kept as far as `budget` bytes go, and found again by another pass where they are not.
    """

    parents: Sequence[StageRunner]
    assembly: FeatureAssembly
    stages: Sequence[Stage]
    roles: ParameterRoles
    budget: int
    data: GoalData | None = None
    _used: int = 0
    _stored: dict[tuple[int, Stage], list[Tensor]] = field(default_factory=dict)

    def of(self, stage: Stage, batch: Batch, number: int) -> list[Tensor]:
        """One target per call of the stage, in the order of the calls, without padding."""
        if (number, stage) in self._stored:
            targets = self._stored.pop((number, stage))
            self._used -= _size(targets)
            return targets
        by_stage = self._run(self._together_with(stage), batch, number)
        for other, later in by_stage.items():
            if other is not stage and self._used + _size(later) <= self.budget:
                self._used += _size(later)
                self._stored[number, other] = later
        return by_stage[stage]

    def combine(
        self, name: str, values: Sequence[Tensor], *, follows: bool = False, believed: Tensor | None = None
    ) -> Tensor:
        """The target of a map (or of the sum it goes into) from the rows that each parent gives."""
        for parent, rows in zip(self.parents, values, strict=True):
            require_finite_rows(rows, self.roles.label(name), parent.name)
        return self.assembly.combine(name, values, follows=follows, believed=believed)

    def believed(self, number: int, rows: int, valid: Tensor | None) -> Tensor | None:
        return None if self.data is None else self.data.believed(number, rows, valid)

    def _together_with(self, stage: Stage) -> list[Stage]:
        """The stages of the same block that are still to come, while there is room for their targets."""
        if self._used >= self.budget * 0.9:
            return [stage]
        later = self.stages[self.stages.index(stage) + 1 :]
        return [stage, *(s for s in later if s.place == stage.place and s.kind != "experts")]

    def _run(self, stages: Sequence[Stage], batch: Batch, number: int) -> dict[Stage, list[Tensor]]:
        runs = [parent.run(stages, batch, number) for parent in self.parents]
        padding = PaddingMask(batch, self.parents[0].model)
        by_stage: dict[Stage, list[Tensor]] = {}
        for stage in stages:
            targets = []
            for calls in zip(*(run[stage] for run in runs), strict=True):
                valid = padding.of_side(calls[0].rows, encoder=calls[0].encoded)
                rows = [rows_of(stage.outcome(call), valid) for call in calls]
                believed = self.believed(number, calls[0].rows, valid)
                targets.append(self.combine(calls[0].weight, rows, follows=stage.follows, believed=believed))
            by_stage[stage] = targets
        return by_stage


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class LayerSolver:
    """`merged` holds the average at first and the result in the end."""

    merged: StageRunner
    targets: LayerTargets
    ridge: float | None
    """None: for every regression the best of several."""
    floor: float
    report: LayerReport

    def solve(self, stage: Stage, examples: DataPass) -> None:
        if stage.kind == "norm":
            self._norm(stage, examples)
        elif stage.kind == "experts":
            self._experts(stage, examples)
        else:
            self._maps(stage, examples)

    # --- maps of one input, or of one sum ---------------------------------------------------------------------------
    def _maps(self, stage: Stage, examples: DataPass) -> None:
        joint = stage.kind == "sum"
        maps = [LinearWeight.of(self.merged.model, name) for name in stage.names]
        regression = OwnedRegression(None if joint else self.owners(stage), self._sums)
        ones = sum(m.bias is not None for m in maps) if joint else int(maps[0].bias is not None)
        for batch in self._rows(stage, examples):
            inputs = batch.inputs if joint else batch.inputs[:1]
            columns = torch.cat([*inputs, *[torch.ones_like(inputs[0][:, :1])] * ones], 1)
            targets, outcomes = (
                (batch.targets[0], batch.outcomes[0]) if joint else (_side(batch.targets), _side(batch.outcomes))
            )
            residual = targets - outcomes
            target = residual + torch.stack(batch.outputs).sum(0) if joint else targets
            regression.add(columns, residual, target, batch.believed)
            for own, call in zip(maps, batch.calls, strict=True):
                own.transposed = call.transposed
        solved = regression.solve(self.ridge, self.floor)
        self.report.warn_if_few(stage, regression.rows, regression.width)
        row = column = 0
        bias_row = regression.width - ones
        for own in maps:
            width, out = own.sizes
            change = solved.change[:, column : column + out]
            own.add(change[row : row + width], change[bias_row] if own.bias is not None else None)
            if joint:  # each map has rows, and a row for its bias, of its own
                row, bias_row = row + width, bias_row + (own.bias is not None)
            else:  # each map has columns of its own
                column += out
        self.report.solved(stage, regression.rows, solved, ridge=solved.ridge)

    @property
    def _weighs(self) -> bool:
        """Whether parents count more on some rows than on others."""
        return self.targets.data is not None and self.targets.data.beliefs is not None

    @property
    def _sums(self) -> type[RidgeRegression]:
        return RidgeSearch if self.ridge is None else RidgeRegression

    def owners(self, stage: Stage) -> Tensor | None:
        """For each output of the stage's maps, the parent whose unit it makes; None where rows count alike."""
        if not self._weighs:
            return None
        owners = [self.targets.assembly.owners(name) for name in stage.names]
        return torch.cat([one for one in owners if one is not None]) if all(o is not None for o in owners) else None

    # --- norms on the stream or on a branch -------------------------------------------------------------------------
    def _norm(self, stage: Stage, examples: DataPass) -> None:
        fit = GainRegression()
        module: Any = self.merged.model.get_submodule(stage.names[0])
        for batch in self._rows(stage, examples):
            residual = batch.targets[0] - batch.outcomes[0]
            fit.add(normalised(module, batch.inputs[0]), residual, residual + batch.outputs[0])
        bias = getattr(module, "bias", None)
        solved = fit.solve(RIDGE if self.ridge is None else self.ridge, self.floor, bias=bias is not None)
        change_by(module.weight, solved.change[0])
        if bias is not None:
            change_by(bias, solved.change[1])
        self.report.solved(stage, fit.rows, solved, ridge=solved.ridge)

    # --- experts ----------------------------------------------------------------------------------------------------
    def _experts(self, stage: Stage, examples: DataPass) -> None:
        """Each expert towards the parents' same expert, each as far as it is believed, on the tokens that the merged
        model sends to it."""
        regressions: dict[int, RidgeRegression] = {}
        label = self.report.roles.label(stage.names[0])
        for number, batch in enumerate(examples):
            routing = ExpertRouting(batch)
            own = self.merged.run([stage], batch, number, routing)[stage]
            tokens = routing.tokens_of(self.merged, self.targets.stages, stage, batch, number) if self._weighs else None
            others = [parent.run([stage], batch, number, routing)[stage] for parent in self.targets.parents]
            for call, *theirs in zip(own, *others, strict=True):
                valid = routing.valid(call)
                inputs, output = rows_of(call.input, valid), rows_of(call.output, valid)
                believed = None
                if tokens is not None:
                    at = rows_of(tokens[call.expert or 0][:, None], valid)[:, 0]
                    believed = self.targets.believed(number, routing.tokens, None)[:, at]  # type: ignore[index]
                given = [rows_of(other.output, valid) for other in theirs]
                target = self.targets.combine(call.weight, given, believed=believed)
                require_finite_rows(inputs, label, "the merged model so far")
                regressions.setdefault(call.expert or 0, self._sums()).add(inputs, target - output, target)
        weight = self.merged.model.get_parameter(stage.names[0])
        kept = []
        for part in range(weight.shape[0]):
            regression = regressions.pop(part, None) or RidgeRegression()
            if regression.rows < FEWEST_FOR_AN_EXPERT * weight.shape[2]:
                kept.append((part, regression.rows))
                continue
            solved = solve_regression(regression, self.ridge, self.floor)
            change_by(weight[part], solved.change.T)
            self.report.solved(stage, regression.rows, solved, ridge=solved.ridge, expert=part)
        self.report.kept(stage, weight.shape[2], kept)

    # --- what all stages share --------------------------------------------------------------------------------------
    def _rows(self, stage: Stage, examples: DataPass) -> Iterator[StageRows]:
        for number, batch in enumerate(examples):
            own = self.merged.run([stage], batch, number)[stage]
            targets = self.targets.of(stage, batch, number)
            padding = PaddingMask(batch, self.merged.model)
            for places in calls_by_number(stage, own):
                calls = [own[place] for place in places]
                valid = padding.of_side(calls[0].rows, encoder=calls[0].encoded)
                inputs = [rows_of(call.input, valid) for call in calls]
                for call, rows in zip(calls, inputs, strict=True):
                    require_finite_rows(rows, self.report.roles.label(call.weight), "the merged model so far")
                outputs = [rows_of(call.output, valid) for call in calls]
                outcomes = [rows_of(stage.outcome(call), valid) for call in calls]
                believed = self.targets.believed(number, calls[0].rows, valid)
                yield StageRows(calls, inputs, outputs, outcomes, [targets[place] for place in places], believed)


@dataclass
class LinearWeight:
    """A linear map of the merged model, whichever way round its weight is stored."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool = False

    @classmethod
    def of(cls, model: nn.Module, name: str) -> LinearWeight:
        parameters = dict(model.named_parameters())
        return cls(parameters[name], parameters.get(bias_name(name)))

    @property
    def sizes(self) -> tuple[int, int]:
        """In, out."""
        rows, columns = self.weight.shape
        return (rows, columns) if self.transposed else (columns, rows)

    def add(self, change: Tensor, bias: Tensor | None = None) -> None:
        """`change` is (in, out)."""
        change_by(self.weight, change if self.transposed else change.T)
        if self.bias is not None and bias is not None:
            change_by(self.bias, bias)


def bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def change_by(parameter: Tensor, change: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(parameter.double() + change)


def normalised(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a norm multiplies by its gain, however it stores the gain: its output is affine in the stored weight."""
    weight: Any = module.weight
    with torch.no_grad():
        zero, one = (
            torch.func.functional_call(module, {"weight": torch.full_like(weight, value)}, (inputs,))
            for value in (0.0, 1.0)
        )
    difference: Tensor = one - zero
    return difference


def calls_by_number(stage: Stage, calls: Sequence[WeightCall]) -> Iterator[tuple[int, ...]]:
    """Places among the calls: the first call of every map of the stage, then the second …; these have the same rows."""
    places: dict[str, list[int]] = {name: [] for name in stage.names}
    for place, call in enumerate(calls):
        places[call.weight].append(place)
    yield from zip(*places.values(), strict=True)


def _side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)
