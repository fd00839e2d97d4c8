"""The walk: for each stage run the models, sum up, solve, and put the result into the merged model before going on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.merging.reconstruct.goals import Goals
from isomerge.merging.reconstruct.regression import GainFit, Regression, Solved
from isomerge.merging.reconstruct.roles import Roles
from isomerge.merging.reconstruct.running import (
    Examples,
    Routing,
    Runner,
    require_finite_rows,
    rows_of,
    valid_rows,
)
from isomerge.merging.reconstruct.stages import Stage
from isomerge.merging.reconstruct.watch import Use

FEW = 4  # rows per input below which a regression is warned about
FEWEST_FOR_AN_EXPERT = 10  # … below which an expert keeps the average


@dataclass(frozen=True)
class Call:
    """The n-th call of every map of a stage on one batch, without its padding."""

    uses: list[Use]  # of the merged model
    inputs: list[Tensor]  # (rows, in) each
    outputs: list[Tensor]
    outcomes: list[Tensor]  # the output, or the sum it goes into
    goals: list[Tensor]  # the weighted mean of the parents' outcomes


@dataclass
class Progress:
    """What a walk tells when it is over."""

    roles: Roles
    layers: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def solved(self, stage: Stage, rows: int, solved: Solved, **more: Any) -> None:
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
            told = ", ".join(f"{part} ({rows} tokens)" for part, rows in kept[:8])
            more = f" and {len(kept) - 8} more" if len(kept) > 8 else ""
            self.warnings.append(
                f"{self.roles.label(stage.names[0])}: experts {told}{more} keep the average; each needs "
                f"{FEWEST_FOR_AN_EXPERT * inputs} tokens, {FEWEST_FOR_AN_EXPERT} per input. Give more calibration data."
            )


@dataclass
class Walk:
    """`merged` holds the average at first and the result in the end."""

    merged: Runner
    goals: Goals
    ridge: float
    floor: float
    told: Progress

    def solve(self, stage: Stage, examples: Examples) -> None:
        if stage.kind == "norm":
            self._norm(stage, examples)
        elif stage.kind == "experts":
            self._experts(stage, examples)
        else:
            self._maps(stage, examples)

    # --- maps of one input, or of one sum ---------------------------------------------------------------------------
    def _maps(self, stage: Stage, examples: Examples) -> None:
        regression = Regression()
        joint = stage.kind == "sum"
        maps = [Map.of(self.merged.model, name) for name in stage.names]
        ones = sum(m.bias is not None for m in maps) if joint else int(maps[0].bias is not None)
        for call in self._calls(stage, examples):
            inputs = call.inputs if joint else call.inputs[:1]
            columns = torch.cat([*inputs, *[torch.ones_like(inputs[0][:, :1])] * ones], 1)
            goals, outcomes = (call.goals[0], call.outcomes[0]) if joint else (_side(call.goals), _side(call.outcomes))
            residual = goals - outcomes
            target = residual + torch.stack(call.outputs).sum(0) if joint else goals
            regression.add(columns, residual, target)
            for own, use in zip(maps, call.uses, strict=True):
                own.transposed = use.transposed
        solved = regression.solve(self.ridge, self.floor)
        self.told.warn_if_few(stage, regression.rows, regression.gram.shape[0])
        row = column = 0
        bias_row = regression.gram.shape[0] - ones
        for own in maps:
            width, out = own.sizes
            change = solved.change[:, column : column + out]
            own.add(change[row : row + width], change[bias_row] if own.bias is not None else None)
            if joint:  # each map has rows, and a row for its bias, of its own
                row, bias_row = row + width, bias_row + (own.bias is not None)
            else:  # each map has columns of its own
                column += out
        self.told.solved(stage, regression.rows, solved, ridge=self.ridge)

    # --- norms on the stream or on a branch -------------------------------------------------------------------------
    def _norm(self, stage: Stage, examples: Examples) -> None:
        fit = GainFit()
        module: Any = self.merged.model.get_submodule(stage.names[0])
        for call in self._calls(stage, examples):
            residual = call.goals[0] - call.outcomes[0]
            fit.add(normalised(module, call.inputs[0]), residual, residual + call.outputs[0])
        bias = getattr(module, "bias", None)
        solved = fit.solve(self.ridge, self.floor, bias=bias is not None)
        change_by(module.weight, solved.change[0])
        if bias is not None:
            change_by(bias, solved.change[1])
        self.told.solved(stage, fit.rows, solved, ridge=self.ridge)

    # --- experts ----------------------------------------------------------------------------------------------------
    def _experts(self, stage: Stage, examples: Examples) -> None:
        """Each expert towards the mean of the parents' same expert, on the tokens the merged model sends to it."""
        found: dict[int, Regression] = {}
        label = self.told.roles.label(stage.names[0])
        for number, batch in enumerate(examples):
            routing = Routing(batch)
            own = self.merged.run([stage], batch, number, routing)[stage]
            others = [parent.run([stage], batch, number, routing)[stage] for parent in self.goals.parents]
            for use, *theirs in zip(own, *others, strict=True):
                valid = routing.valid(use)
                inputs, output = rows_of(use.input, valid), rows_of(use.output, valid)
                goal = self.goals.combine(use.key.name, [rows_of(other.output, valid) for other in theirs])
                require_finite_rows(inputs, label, "the merged model so far")
                found.setdefault(use.key.part or 0, Regression()).add(inputs, goal - output, goal)
        weight = self.merged.model.get_parameter(stage.names[0])
        kept = []
        for part in range(weight.shape[0]):
            regression = found.pop(part, None) or Regression()
            if regression.rows < FEWEST_FOR_AN_EXPERT * weight.shape[2]:
                kept.append((part, regression.rows))
                continue
            solved = regression.solve(self.ridge, self.floor)
            change_by(weight[part], solved.change.T)
            self.told.solved(stage, regression.rows, solved, ridge=self.ridge, expert=part)
        self.told.kept(stage, weight.shape[2], kept)

    # --- what all stages share --------------------------------------------------------------------------------------
    def _calls(self, stage: Stage, examples: Examples) -> Iterator[Call]:
        for number, batch in enumerate(examples):
            own = self.merged.run([stage], batch, number)[stage]
            goals = self.goals.of(stage, batch, number)
            for places in calls_by_number(stage, own):
                uses = [own[place] for place in places]
                valid = valid_rows(uses[0], batch, self.merged.two_sided)
                inputs = [rows_of(use.input, valid) for use in uses]
                for use, rows in zip(uses, inputs, strict=True):
                    require_finite_rows(rows, self.told.roles.label(use.key.name), "the merged model so far")
                outputs = [rows_of(use.output, valid) for use in uses]
                outcomes = [rows_of(stage.outcome(use), valid) for use in uses]
                yield Call(uses, inputs, outputs, outcomes, [goals[place] for place in places])


@dataclass
class Map:
    """A linear map of the merged model, whichever way round its weight is stored."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool = False

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Map:
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
    return one - zero


def calls_by_number(stage: Stage, uses: Sequence[Use]) -> Iterator[tuple[int, ...]]:
    """Places among the uses: the first call of every map of the stage, then the second …; these have the same rows."""
    places: dict[str, list[int]] = {name: [] for name in stage.names}
    for place, use in enumerate(uses):
        places[use.key.name].append(place)
    yield from zip(*places.values(), strict=True)


def _side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)
