"""Gradient steps, where they are asked for, without labels: `refine` on each solved block, `polish` on the whole model.

A regression cannot change what attention looks at or which units are on, as these are not linear. A few steps of Adam
on ‖block(z) − target‖² can, and nothing but the block is run. At the end the whole merged model may be drawn towards
the weighted mean of its parents' probabilities, or of what they give where they have no scores of classes or tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isomerge.data.base import Batch
from isomerge.merging.layerwise.assembly import FeatureAssembly, sum_of
from isomerge.merging.layerwise.goals import GoalData
from isomerge.merging.layerwise.roles import ParameterRoles
from isomerge.merging.layerwise.stage_runner import StageRunner
from isomerge.merging.layerwise.stages import StagePlan
from isomerge.running.blocks import BlockIndex, copied, tensors_in
from isomerge.running.call_recorder import ForwardDone
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import distance, rows_of, scores_in

# First steps, relative to the size of a parameter.
REFINE_RATE = 0.02
POLISH_RATES = (0.003, 0.015)
"""Which is better depends on how much there is to learn and to learn it from (docs/research/skills.md)."""
WARM_UP = 20
T = TypeVar("T")


# --- blocks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BlockCall:
    """One call of a block: what it was given, and the rows that count."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Tensor
    valid: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in tensors_in([self.arguments, self.keywords, self.target]))


@dataclass
class BlockRefinement:
    merged: StageRunner
    parents: Sequence[StageRunner]
    assembly: FeatureAssembly
    roles: ParameterRoles
    plan: StagePlan
    steps: int
    budget: int

    def refine(self, place: BlockIndex, data: GoalData) -> dict[str, Any] | None:
        """Lower the error of the block at `place`; None where there is no such block."""
        name = self.block(place)
        # The last map that writes to the stream says how the parents' streams come together.
        writers = [stage.names[0] for stage in self.plan.stages if stage.place == place and stage.follows]
        if name is None or not writers:
            return None
        calls = self._collect(place, name, writers[-1], data)
        block = self.merged.model.get_submodule(name)
        variance = (
            sum(float(rows_of(c.target, c.valid).var(0, unbiased=False).mean()) for c in calls) / len(calls) or 1.0
        )
        parameters = [p for p in block.parameters() if p.is_floating_point()]
        kept = [p.detach().clone() for p in parameters]

        def loss(one: BlockCall) -> Tensor:
            output = _hidden(block(*copied(one.arguments), **copied(one.keywords)))
            return rows_of(output - one.target, one.valid).square().mean() / variance

        before = _error(loss, calls)
        descend(parameters, loss, shuffled(calls), self.steps, REFINE_RATE)
        after = _error(loss, calls)
        if not after < before:
            put_back(parameters, kept)
            after = before
        own = [
            self.roles.label(full) for full, _ in self.merged.model.named_parameters() if full.startswith(f"{name}.")
        ]
        return {"block": _in_common(own), "error_before": before, "error_after": after, "batches": len(calls)}

    def block(self, place: BlockIndex) -> str | None:
        """The name of the block at a place."""
        stack, number = place
        names = self.plan.stacks.names
        return names[stack][number] if stack < len(names) and number < len(names[stack]) else None

    def _collect(self, place: BlockIndex, name: str, writer: str, data: GoalData) -> list[BlockCall]:
        """As many batches as the budget holds, at least one, evenly over the data."""
        calls: list[BlockCall] = []
        total = data.examples.count or 1
        every = 1
        for number, batch in enumerate(data.examples):
            if number % every:
                continue
            arguments, keywords, _ = _block_call(self.merged, name, place, batch, number)
            outputs = [
                parent.tokens.placed(_block_call(parent, name, place, batch, number)[2], batch)
                for parent in self.parents
            ]
            rows = [output.reshape(-1, output.shape[-1]) for output in outputs]
            believed = data.believed(number, rows[0].shape[0])
            target = self.assembly.combine(writer, rows, follows=True, believed=believed).reshape(outputs[0].shape)
            padding = PaddingMask(batch, self.merged.model)
            one = BlockCall(arguments, keywords, target, padding.of_side(rows[0].shape[0], encoder=place[0] == 0))
            if not calls:
                every = math.ceil(total / max(1, min(total, self.budget // max(1, one.nbytes))))
            calls.append(one)
        return calls


@torch.no_grad()
def _error(loss: Callable[[BlockCall], Tensor], calls: Sequence[BlockCall]) -> float:
    mean = sum(float(loss(one)) for one in calls) / len(calls)
    return float(mean**0.5)


def _block_call(
    runner: StageRunner, name: str, place: BlockIndex, batch: Batch, number: int
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What a block is given in a forward pass, and what it gives."""
    block = runner.model.get_submodule(runner.last_block(name))
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        seen.append((arguments, keywords, _hidden(output).detach()))
        raise ForwardDone

    watching = block.register_forward_hook(hook, with_kwargs=True)
    with watching, torch.no_grad(), runner.going_on(number, place), contextlib.suppress(ForwardDone):
        runner.model(**batch)
    return seen[0]


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _in_common(names: Sequence[str]) -> str:
    """The block that all these tensors are in: what their names begin with, up to its number."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    parts = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)


# --- the whole model --------------------------------------------------------------------------------------------------
@dataclass
class PredictionLoss:
    """How far the merged model's predictions are from those of its parents, each as far as it is believed."""

    merged: StageRunner
    parents: Sequence[StageRunner]
    weights: Sequence[float]
    data: GoalData

    def of(self, numbered: tuple[int, Batch]) -> Tensor:
        """On one batch."""
        number, batch = numbered
        heard = self.data.heard(number, len(self.parents))
        with torch.no_grad():
            given = self._given(batch, heard)
        parts, padding = [], PaddingMask(batch, self.merged.model)
        for field, own in scores_in(self.merged.model(**batch)).items():
            rows = own[..., 0].numel()
            valid = padding.of_side(rows, encoder=False)
            theirs = [rows_of(scores[field], valid) for scores in given]
            believed = self.data.believed(number, rows, valid)
            shares = self.weights if believed is None else believed[heard][:, :, None].to(own)
            parts.append(distance(self.merged.model, field, rows_of(own, valid), theirs, shares))
        return sum_of(parts)

    def _given(self, batch: Batch, heard: Sequence[int]) -> list[dict[str, Tensor]]:
        """What these parents give; of other vocabularies, as scores for the tokens of the first."""
        others = {m for m in heard if self.parents[m].tokens.match is not None}
        given = {m: scores_in(self.parents[m].model(**batch)) for m in ({0, *heard} if others else heard)}
        for m in others:
            tokens = self.parents[m].tokens
            given[m] = {field: tokens.scores(own, given[0][field], batch) for field, own in given[m].items()}
        return [given[m] for m in heard]

    @torch.no_grad()
    def mean(self) -> float:
        values = [float(self.of(numbered)) for numbered in enumerate(self.data.examples)]
        return sum(values) / len(values)


def polish(loss: PredictionLoss, steps: int, rate: float, report: Callable[[int], None]) -> dict[str, Any]:
    """What was done, and how far the merged model is from its parents' predictions before and after; never farther."""
    parameters = [p for p in loss.merged.model.parameters() if p.is_floating_point()]
    kept = [p.detach().cpu().clone() for p in parameters]
    examples = loss.data.examples
    before = loss.mean()
    batches = spread(NumberedBatches(examples), examples.count or 1, steps)
    descend(parameters, loss.of, batches, steps, rate, report)
    after = loss.mean()
    if not after < before:
        put_back(parameters, kept)
        after = before
    return {"steps": steps, "rate": rate, "loss_before": before, "loss_after": after}


@dataclass(frozen=True)
class NumberedBatches:
    """The batches of a pass with their numbers, as often as they are asked for."""

    examples: DataPass

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return enumerate(iter(self.examples))


# --- steps ------------------------------------------------------------------------------------------------------------
def descend(
    parameters: Sequence[Tensor],
    loss: Callable[[T], Tensor],
    batches: Iterator[T],
    steps: int,
    rate: float,
    report: Callable[[int], None] | None = None,
    sizes: Sequence[float] | None = None,
) -> None:
    """Lower `loss(batch)` by `steps` steps. `rate` is the first step, relative to `sizes`, by default each rms."""
    sizes = sizes or [float(p.detach().float().square().mean().sqrt()) for p in parameters]
    typical = sorted(sizes)[len(sizes) // 2] or 1.0
    groups = [{"params": [p], "first": rate * (size or typical)} for p, size in zip(parameters, sizes, strict=True)]
    optimiser = torch.optim.Adam(groups, lr=rate)
    for parameter in parameters:
        parameter.requires_grad_(True)
    for step in range(steps):
        share = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / WARM_UP)
        for group in optimiser.param_groups:
            group["lr"] = group["first"] * share
        with torch.enable_grad():
            value = loss(next(batches))
            optimiser.zero_grad(set_to_none=True)
            value.backward()
        optimiser.step()
        if report:
            report(step + 1)
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def shuffled(items: Sequence[T]) -> Iterator[T]:
    """Over and over, each time in another order; always the same orders."""
    draw = torch.Generator().manual_seed(0)
    while True:
        for place in torch.randperm(len(items), generator=draw).tolist():
            yield items[place]


def spread(items: Iterable[T], count: int, steps: int) -> Iterator[T]:
    """`steps` of `count` items that can only be passed over in order: evenly over them, again and again if need be."""
    every = max(1, count // steps)
    while True:
        yield from itertools.islice(items, 0, None, every)


def put_back(parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
