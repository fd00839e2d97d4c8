"""After a block was solved map by map: all its weights together, by gradient, towards the same goal.

A regression cannot change what attention looks at or which units are on, as these are not linear. A few steps of Adam
on ‖block(z) − goal‖² can. No labels, and nothing but the block is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomerge.merge.reconstruct.assembly import Assembly
from isomerge.merge.reconstruct.blocks import Place, Stacks
from isomerge.merge.reconstruct.descent import descend, shuffled
from isomerge.merge.reconstruct.running import Batch, Examples, Runner, rows_of
from isomerge.merge.reconstruct.watch import Enough

RATE = 0.02  # first step, relative to the size of a parameter


@dataclass(frozen=True)
class Seen:
    """One call of a block: what it was given, and the rows that count."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    goal: Tensor
    valid: Tensor | None


@dataclass
class Refinement:
    merged: Runner
    parents: Sequence[Runner]
    assembly: Assembly
    stacks: Stacks
    writer: dict[Place, str]
    """For each block the name of a map that writes to the stream: it says how the parents' streams come together."""
    steps: int
    budget: int

    def refine(self, place: Place, examples: Examples) -> dict[str, Any] | None:
        """Lower the error of the block at `place`; None where there is no such block."""
        name = self.writer.get(place)
        if name is None or place[1] >= len(self.stacks.names[place[0]]):
            return None
        seen = self._collect(place, name, examples)
        block = self.merged.model.get_submodule(self.stacks.names[place[0]][place[1]])
        spread = sum(float(rows_of(s.goal, s.valid).var(0, unbiased=False).mean()) for s in seen) / len(seen) or 1.0
        parameters = [p for p in block.parameters() if p.is_floating_point()]
        kept = [p.detach().clone() for p in parameters]

        def loss(one: Seen) -> Tensor:
            output = _hidden(block(*one.arguments, **one.keywords))
            return rows_of(output - one.goal, one.valid).square().mean() / spread

        before = _error(loss, seen)
        descend(parameters, loss, shuffled(seen), self.steps, RATE)
        after = _error(loss, seen)
        if not after < before:
            with torch.no_grad():
                for parameter, old in zip(parameters, kept, strict=True):
                    parameter.copy_(old)
            after = before
        return {"block": self.stacks.names[place[0]][place[1]], "error_before": before, "error_after": after}

    def _collect(self, place: Place, name: str, examples: Examples) -> list[Seen]:
        """As many batches as the budget holds."""
        found: list[Seen] = []
        held = 0
        for number, batch in enumerate(examples):
            (arguments, keywords), _ = _block_call(self.merged, self.stacks, place, batch, number)
            outputs = [_block_call(parent, self.stacks, place, batch, number)[1] for parent in self.parents]
            rows = [output.reshape(-1, output.shape[-1]) for output in outputs]
            goal = self.assembly.combine(name, rows, follows=True).reshape(outputs[0].shape)
            held += 2 * goal.nbytes
            if found and held > self.budget:
                break
            found.append(Seen(arguments, keywords, goal, _valid(batch, goal, self.merged.two_sided, place)))
        return found


@torch.no_grad()
def _error(loss: Callable[[Seen], Tensor], seen: Sequence[Seen]) -> float:
    return (sum(float(loss(one)) for one in seen) / len(seen)) ** 0.5


def _block_call(
    runner: Runner, stacks: Stacks, place: Place, batch: Batch, number: int
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], Tensor]:
    """What a block is given in a forward pass, and what it gives."""
    block = runner.model.get_submodule(stacks.names[place[0]][place[1]])
    found: list[Any] = []

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        found.append(((arguments, keywords), _hidden(output).detach()))
        raise Enough

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad(), runner.going_on(number, place), contextlib.suppress(Enough):
            runner.model(**batch)
    finally:
        handle.remove()
    return found[0]


def _hidden(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _valid(batch: Batch, goal: Tensor, two_sided: bool, place: Place) -> Tensor | None:
    mask = batch.get("decoder_attention_mask" if two_sided and place[0] > 0 else "attention_mask")
    return mask.reshape(-1).bool() if mask is not None and mask.numel() == goal[..., 0].numel() else None
