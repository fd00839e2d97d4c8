"""The repeated blocks of a model, and going on from the end of one without running those before it.

Blocks are found as the items of a `ModuleList` that a forward pass calls once each, in order. To go on after block i,
the model's own code runs, but blocks 0 … i give the stored output of block i at once; so masks, positions and
everything else between the blocks need not be known here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BlockIndex = tuple[int, int]
"""Stack, block: where the model is, or which block comes next; stacks in the order they run."""


@dataclass
class BlockStacks:
    """Names of the blocks of a model, stack by stack."""

    names: list[list[str]] = field(default_factory=list)

    def blocks(self, model: nn.Module) -> Iterator[tuple[BlockIndex, nn.Module]]:
        for stack, names in enumerate(self.names):
            for number, name in enumerate(names):
                yield (stack, number), model.get_submodule(name)


def find_stacks(model: nn.Module, run: Callable[[], Any]) -> BlockStacks:
    """Outermost lists whose items are called once each, in order, in one forward pass."""
    lists: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(outer + ".") for outer in lists):
            lists[name] = [f"{name}.{i}" for i in range(len(module))]
    calls: list[str] = []
    with contextlib.ExitStack() as hooks:
        for item in itertools.chain.from_iterable(lists.values()):
            block = model.get_submodule(item)
            hooks.enter_context(block.register_forward_pre_hook(lambda *_, item=item: calls.append(item)))
        run()
    stacks = []
    for items in lists.values():
        own = [call for call in calls if call in set(items)]
        if items and own == items:
            stacks.append((calls.index(items[0]), items))
    return BlockStacks([items for _, items in sorted(stacks)])


class BlockCache:
    """The output of the last finished block, per batch and model, for as many batches as fit into `budget` bytes."""

    def __init__(self, stacks: BlockStacks, budget: int) -> None:
        self._stacks, self._budget, self._used = stacks, budget, 0
        self._kept: dict[tuple[int, int, int], tuple[int, Any, int]] = {}  # (model, batch, stack): block, output, bytes

    @contextlib.contextmanager
    def going_on(self, model: nn.Module, who: int, batch: int, place: BlockIndex) -> Iterator[None]:
        """Run `model` with the blocks before `place` skipped where their end is stored.

        Those that do run are stored in passing, except the one at `place` and what follows it: they are not finished.
        """
        replaced = []
        hooks = contextlib.ExitStack()
        for (stack, number), block in self._stacks.blocks(model):
            if (stack, number) >= place:
                break
            kept = self._kept.get((who, batch, stack))
            if kept is not None and number <= kept[0]:
                block.forward = _giving(kept[1])
                replaced.append(block)
            elif self._last_before(stack, place) == number:
                hooks.enter_context(block.register_forward_hook(self._storing(who, batch, stack, number)))
        try:
            with hooks:
                yield
        finally:
            for block in replaced:
                del block.forward  # the class's own comes back

    def _last_before(self, stack: int, place: BlockIndex) -> int:
        return place[1] - 1 if stack == place[0] else len(self._stacks.names[stack]) - 1

    def _storing(self, who: int, batch: int, stack: int, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            size = sum(t.nbytes for t in tensors_in(output))
            key = (who, batch, stack)
            before = self._kept.pop(key, (0, None, 0))[2]
            self._used += size - before
            if self._used > self._budget:
                self._used -= size
                return
            self._kept[key] = (number, copied(output), size)

        return hook


def _giving(output: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: copied(output)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def copied(tree: Any) -> Any:
    """A copy, since a model may add to what it is given in place."""
    if isinstance(tree, Tensor):
        with torch._C.DisableTorchFunction():
            return tree.detach().clone()
    if isinstance(tree, (tuple, list)):
        return type(tree)(copied(part) for part in tree)
    if isinstance(tree, dict):
        return {name: copied(part) for name, part in tree.items()}
    return tree
