"""The walk through a model: which weights are solved together, in the order in which they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from isomerge.running.blocks import BlockIndex, BlockStacks
from isomerge.running.call_recorder import CallRecorder, RecordedWeights, WeightCall


@dataclass(frozen=True)
class Stage:
    """Weights that are solved in one regression.

    - "inputs": maps that read the same input, each towards the mean of the parents' outputs;
    - "sum": maps that are added to one sum, towards the mean of the parents' sums, so that what earlier layers left
      wrong in the stream is repaired;
    - "norm": a norm's gain and bias, towards the mean of the parents' outputs, or sums where it is added to one;
    - "experts": the experts of one stacked weight, each by itself.
    """

    kind: str
    names: tuple[str, ...]
    calls: int
    """How many calls to wait for (0: as many as come)."""
    follows: bool
    """The outcome is the sum that the output goes into."""
    place: BlockIndex

    def outcome(self, call: WeightCall) -> Tensor:
        """What is to be like the parents' mean."""
        return call.sum if self.follows else call.output

    def is_over(self, calls: list[WeightCall]) -> bool:
        if self.kind == "experts" or len(calls) < self.calls:
            return False
        return not self.follows or all(call.closed for call in calls)


@dataclass(frozen=True)
class StagePlan:
    stages: list[Stage]
    stacks: BlockStacks


def find_stages(
    model: nn.Module,
    run: Callable[[], object],
    stacks: BlockStacks,
    *,
    weights: list[str],
    norms: list[str],
    writes: Callable[[str], bool],
    has_bias: Callable[[str], bool],
) -> StagePlan:
    """Record one forward pass. `writes(name)`: may this weight write to the residual stream?"""
    recorder = CallRecorder(RecordedWeights.of(model, weights, norms), lambda calls: False, follow={*weights, *norms})
    recorder.place = (0, 0)
    with contextlib.ExitStack() as hooks, recorder:
        for place, block in stacks.blocks(model):
            before, after = place, (place[0], place[1] + 1)
            hooks.enter_context(block.register_forward_pre_hook(lambda *_, at=before: setattr(recorder, "place", at)))
            hooks.enter_context(block.register_forward_hook(lambda *_, at=after: setattr(recorder, "place", at)))
        run()
    return StagePlan(_grouped(recorder.calls, set(norms), writes, has_bias), stacks)


def _grouped(
    calls: list[WeightCall], norms: set[str], writes: Callable[[str], bool], has_bias: Callable[[str], bool]
) -> list[Stage]:
    by_name: dict[str, list[tuple[int, WeightCall]]] = {}
    for order, call in enumerate(calls):
        by_name.setdefault(call.weight, []).append((order, call))
    groups: dict[object, list[str]] = {}
    for name, own in by_name.items():
        groups.setdefault(_group(name, own, norms, writes, has_bias), []).append(name)
    stages = []
    for group, names in groups.items():
        kind = group[0]  # type: ignore[index]
        # What is added to one sum waits for the last of its terms; maps of one input can be solved at once.
        pick = max if kind == "sum" else min
        order, first = pick((by_name[name][0] for name in names), key=lambda pair: pair[0])
        count = 0 if kind == "experts" else sum(len(by_name[name]) for name in names)
        follows = kind == "sum" or (kind == "norm" and first.added)
        stages.append((order, Stage(kind, tuple(names), count, follows, first.place)))
    return [stage for _, stage in sorted(stages, key=lambda pair: pair[0])]


def _group(
    name: str,
    numbered: list[tuple[int, WeightCall]],
    norms: set[str],
    writes: Callable[[str], bool],
    has_bias: Callable[[str], bool],
) -> tuple[object, ...]:
    """Weights with the same answer are solved together."""
    calls = [call for _, call in numbered]
    if name in norms:
        return ("norm", name)
    if any(call.expert is not None for call in calls):
        return ("experts", name)
    if len(calls) == 1 and calls[0].added and writes(name):
        return ("sum", calls[0].sum.data_ptr())
    return ("inputs", has_bias(name), *((call.input.data_ptr(), tuple(call.input.shape)) for call in calls))
