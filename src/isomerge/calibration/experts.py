"""The inputs of experts that transformers holds as one stacked tensor.

Such experts are no modules of their own: one module picks the tokens of each expert and multiplies them by a slice of
its parameters. So while it runs, every picking of rows and every product with a slice is seen by torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isomerge.running.activation_watch import ActivationWatch
from isomerge.running.linear_maps import LinearMap
from isomerge.running.stock import StockModel

WantedSlices = dict[tuple[int, int], list[str]]
"""From the storage of a stacked parameter and the number of an expert to the tensors on disk."""


@dataclass(frozen=True)
class ExpertSlice:
    """A tensor on disk that is a block of rows of one expert's slice of a stacked parameter."""

    weight: str
    expert: int


def expert_slices(stock: StockModel, parameter: str) -> list[ExpertSlice]:
    """Which tensors on disk a stacked parameter (experts, out, in) is made of.

    transformers' own mapping back to the disk is asked what becomes of the numbers of all rows.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts, rows, width = stock.module.get_parameter(parameter).shape
    numbers = torch.arange(experts * rows, dtype=torch.int32).reshape(experts, rows, 1).expand(-1, -1, width)
    slices = []
    for name, tensor in revert_weight_conversion(stock.module, {parameter: numbers}).items():
        first = int(tensor.flatten()[0]) if tensor.ndim == 2 else -1
        expected = torch.arange(first, first + len(tensor), dtype=torch.int32)[:, None].expand_as(tensor)
        if name in stock.checkpoint.tensors and tensor.ndim == 2 and torch.equal(tensor, expected):
            slices.append(ExpertSlice(name, first // rows))
    return slices


def listen_to_experts(
    watch: ActivationWatch, receive: Callable[[str, Tensor], None], weights: Collection[str] | None
) -> dict[str, LinearMap]:
    """Have `receive(weight, rows)` called for the inputs of every expert's weights."""
    maps: dict[str, LinearMap] = {}
    for name, module in watch.modules.items():
        stacked = {
            key: p for key, p in module.named_parameters(recurse=False)
            if p.ndim == 3 and f"{name}.{key}" not in watch.stock.layout.on_disk
        }  # fmt: skip
        slices = {key: expert_slices(watch.stock, f"{name}.{key}") for key in stacked}
        if not any(slices.values()):
            continue
        wanted: WantedSlices = {}
        for key, known in slices.items():
            storage, width = stacked[key].untyped_storage().data_ptr(), stacked[key].shape[2]
            for part in known:
                if weights is None or part.weight in weights:
                    maps[part.weight] = LinearMap(part.weight, name, None, False, width)
                    wanted.setdefault((storage, part.expert), []).append(part.weight)

        def products(tokens: Tensor, wanted: WantedSlices = wanted) -> ExpertProducts:
            return ExpertProducts(tokens, watch.padding.of_length(len(tokens)), wanted, watch, receive)

        watch.surround(module, products)
    return maps


class ExpertProducts(TorchFunctionMode):
    """Sees rows being picked from `tokens` and products with slices of known parameters."""

    def __init__(
        self,
        tokens: Tensor,
        keep: Tensor | None,
        wanted: WantedSlices,
        watch: ActivationWatch,
        receive: Callable[[str, Tensor], None],
    ) -> None:
        self._tokens, self._keep, self._wanted, self._watch, self._receive = tokens, keep, wanted, watch, receive
        self._rows: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and args[0] is self._tokens:
            self._rows = args[1]
        elif func is torch.nn.functional.linear:
            self._look(args[0], args[1])
        return made

    def _look(self, values: Tensor, weight: Tensor) -> None:
        if weight.ndim != 2 or self._rows is None:
            return
        expert = weight.storage_offset() // weight.numel()
        for name in self._wanted.get((weight.untyped_storage().data_ptr(), expert), ()):
            rows = values if self._keep is None else values[self._keep[self._rows]]
            self._watch.require_finite(name, rows)
            self._receive(name, rows)
