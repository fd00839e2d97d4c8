"""Running a parent that has more layers than the merged model: several of its layers are seen as one wide layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isomerge.data.base import Batch
from isomerge.merging.layerwise.parent_views import ParentView
from isomerge.merging.layerwise.stage_runner import ExpertRouting, StageRunner
from isomerge.merging.layerwise.stages import Stage
from isomerge.merging.layerwise.token_matching import OwnTokens
from isomerge.running.blocks import BlockCache, BlockIndex
from isomerge.running.call_recorder import WeightCall


class MatchedRunner(StageRunner):
    """Units and heads of the layers that stand for one are side by side. The stream after them is that after the last;
    in between, that before them with all that their attention adds."""

    def __init__(
        self,
        model: Any,
        name: str,
        who: int,
        cache: BlockCache,
        tokens: OwnTokens,
        view: ParentView,
        ends: frozenset[str],
    ) -> None:
        """`ends`: the weights that are the last to write to the stream in their layer."""
        super().__init__(model, name, who, cache, tokens)
        self._view, self._ends = view, ends

    def going_on(self, number: int, place: BlockIndex) -> contextlib.AbstractContextManager[None]:
        return super().going_on(number, self._places(place)[0])

    def last_block(self, name: str) -> str:
        return self._view.own_names(name + ".")[-1].removesuffix(".")

    def linear_weight(self, name: str, transposed: bool) -> Tensor:
        own = (super(MatchedRunner, self).linear_weight(one, transposed) for one in self._view.own_names(name))
        return torch.cat(list(own))

    def run(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        number: int,
        routing: ExpertRouting | None = None,
        place: BlockIndex | None = None,
    ) -> dict[Stage, list[WeightCall]]:
        own = {stage: self._own(stage) for stage in stages}
        flat = [part for parts in own.values() for part in parts]
        calls = super().run(flat, batch, number, routing, place or stages[0].place)
        return {
            stage: [self._wide(stage, each) for each in zip(*(calls[part] for part in parts), strict=True)]
            for stage, parts in own.items()
        }

    def _own(self, stage: Stage) -> list[Stage]:
        names = zip(*(self._view.own_names(name) for name in stage.names), strict=True)
        places = self._places(stage.place)
        return [replace(stage, names=tuple(own), place=place) for own, place in zip(names, places, strict=False)]

    def _places(self, place: BlockIndex) -> list[BlockIndex]:
        stack, layer = place
        blocks = self._view.blocks or []
        if layer < len(blocks):
            return [(stack, own) for own in blocks[layer]]
        return [(stack, sum(len(own) for own in blocks))]

    def _wide(self, stage: Stage, calls: Sequence[WeightCall]) -> WeightCall:
        first, last = calls[0], calls[-1]
        name = next(name for name in stage.names if first.weight in self._view.own_names(name))
        if len(calls) == 1:
            return replace(first, weight=name)
        inputs = torch.cat([call.input for call in calls], -1)
        if stage.kind != "sum":
            output = torch.cat([call.output for call in calls], -1)
            return replace(last, weight=name, input=inputs, output=output, sum=output)
        output = torch.stack([call.output for call in calls]).sum(0)
        ends = any(one in self._ends for one in stage.names)
        stream = last.sum if ends else first.sum + output - first.output
        return replace(last, weight=name, input=inputs, output=output, sum=stream)
