"""After a block was solved map by map: all its weights together, by gradient, towards the same goal.

A regression cannot change what attention looks at or which units are on, as these are not linear. A few steps of Adam
on ‖block(z) − goal‖² can. No labels, and nothing but the block is run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.merging.reconstruct.assembly import Assembly
from isomerge.merging.reconstruct.blocks import Place, copied, tensors_in
from isomerge.merging.reconstruct.descent import descend, put_back, shuffled
from isomerge.merging.reconstruct.roles import Roles
from isomerge.merging.reconstruct.running import Batch, Examples, Runner, rows_of
from isomerge.merging.reconstruct.stages import Plan
from isomerge.merging.reconstruct.watch import Enough

RATE = 0.02  # first step, relative to the size of a parameter


@dataclass(frozen=True)
class Seen:
    """One call of a block: what it was given, and the rows that count."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    goal: Tensor
    valid: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in tensors_in([self.arguments, self.keywords, self.goal]))


@dataclass
class Refinement:
    merged: Runner
    parents: Sequence[Runner]
    assembly: Assembly
    roles: Roles
    plan: Plan
    steps: int
    budget: int

    def refine(self, place: Place, examples: Examples) -> dict[str, Any] | None:
        """Lower the error of the block at `place`; None where there is no such block."""
        name = self._block(place)
        # The last map that writes to the stream says how the parents' streams come together.
        writers = [stage.names[0] for stage in self.plan.stages if stage.place == place and stage.follows]
        if name is None or not writers:
            return None
        seen = self._collect(place, name, writers[-1], examples)
        block = self.merged.model.get_submodule(name)
        spread = sum(float(rows_of(s.goal, s.valid).var(0, unbiased=False).mean()) for s in seen) / len(seen) or 1.0
        parameters = [p for p in block.parameters() if p.is_floating_point()]
        kept = [p.detach().clone() for p in parameters]

        def loss(one: Seen) -> Tensor:
            output = _hidden(block(*copied(one.arguments), **copied(one.keywords)))
            return rows_of(output - one.goal, one.valid).square().mean() / spread

        before = _error(loss, seen)
        descend(parameters, loss, shuffled(seen), self.steps, RATE)
        after = _error(loss, seen)
        if not after < before:
            put_back(parameters, kept)
            after = before
        own = [
            self.roles.label(full) for full, _ in self.merged.model.named_parameters() if full.startswith(f"{name}.")
        ]
        return {"block": _in_common(own), "error_before": before, "error_after": after, "batches": len(seen)}

    def _block(self, place: Place) -> str | None:
        stack, number = place
        names = self.plan.stacks.names
        return names[stack][number] if stack < len(names) and number < len(names[stack]) else None

    def _collect(self, place: Place, name: str, writer: str, examples: Examples) -> list[Seen]:
        """As many batches as the budget holds, at least one, evenly over the data."""
        found: list[Seen] = []
        total = examples.count or 1
        every = 1
        for number, batch in enumerate(examples):
            if number % every:
                continue
            arguments, keywords, _ = _block_call(self.merged, name, place, batch, number)
            outputs = [_block_call(parent, name, place, batch, number)[2] for parent in self.parents]
            rows = [output.reshape(-1, output.shape[-1]) for output in outputs]
            goal = self.assembly.combine(writer, rows, follows=True).reshape(outputs[0].shape)
            one = Seen(arguments, keywords, goal, _valid(batch, goal, self.merged.two_sided, place))
            if not found:
                every = math.ceil(total / max(1, min(total, self.budget // max(1, one.nbytes))))
            found.append(one)
        return found


@torch.no_grad()
def _error(loss: Callable[[Seen], Tensor], seen: Sequence[Seen]) -> float:
    return (sum(float(loss(one)) for one in seen) / len(seen)) ** 0.5


def _block_call(
    runner: Runner, name: str, place: Place, batch: Batch, number: int
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """What a block is given in a forward pass, and what it gives."""
    block = runner.model.get_submodule(name)
    found: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        found.append((arguments, keywords, _hidden(output).detach()))
        raise Enough

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad(), runner.going_on(number, place), contextlib.suppress(Enough):
            runner.model(**batch)
    finally:
        handle.remove()
    return found[0]


def _hidden(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _in_common(names: Sequence[str]) -> str:
    """The block that all these tensors are in: what their names begin with, up to its number."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    parts = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)


def _valid(batch: Batch, goal: Tensor, two_sided: bool, place: Place) -> Tensor | None:
    mask = batch.get("decoder_attention_mask" if two_sided and place[0] > 0 else "attention_mask")
    return mask.reshape(-1).bool() if mask is not None and mask.numel() == goal[..., 0].numel() else None
