"""The linear maps of a stock module: where their weights are in memory and what they are called on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isomerge.adapters.adapter import require_model
from isomerge.adapters.layout import TRANSPOSED, ModuleLayout
from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.evaluation.probe import load_stock
from isomerge.evaluation.tasks.model import read_weights


@dataclass(frozen=True)
class LinearMap:
    """A weight that multiplies rows of activations: a linear layer, or a convolution as a matrix on patches."""

    weight: str
    """Its name in the checkpoint; a tied output table has the name it would have if it were stored."""
    module: str
    bias: str | None
    transposed: bool
    """Stored as (in, out)."""
    width: int
    """Length of its input rows."""

    def rows_in(self, module: nn.Module, values: Tensor) -> Tensor:
        """The inputs as rows: (…, width)."""
        if isinstance(module, (nn.Conv1d, nn.Conv2d)):
            return _patches(module, values)
        return values


@dataclass(frozen=True)
class Stock:
    """A checkpoint as its stock module, ready to run, with the names of both worlds."""

    checkpoint: Checkpoint
    model: Any
    layout: ModuleLayout
    device: str
    dtype: torch.dtype

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: str = "cpu") -> Stock:
        require_model(checkpoint)
        if not checkpoint.config:
            raise RequestError(
                f"Running {checkpoint.name} on data: it has no config.json, so no stock class can load it. Copy it "
                "from where the model came; in Python, pass a transformers module or open_checkpoint(…, config=…)."
            )
        wide = any(info.dtype == torch.float64 for info in checkpoint.tensors.values())
        dtype = torch.float64 if wide else torch.float32
        model = load_stock(checkpoint.config, read_weights(checkpoint), dtype=dtype)
        model.requires_grad_(False)
        return cls(checkpoint, model.to(device), ModuleLayout(checkpoint), device, dtype)

    def on_disk(self, name: str) -> str:
        """A tensor's name in the checkpoint; one that is not stored keeps its own."""
        return self.layout.on_disk.get(name, name)

    def maps(self) -> list[LinearMap]:
        """Every linear map that is a module of its own (experts that are one stacked tensor are not)."""
        found = []
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.ndim < 2 or isinstance(module, nn.Embedding):
                continue
            if isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups > 1:
                continue  # several small maps in one tensor, none of which sees the whole input
            transposed = type(module).__name__ == TRANSPOSED
            width = weight.shape[0] if transposed else weight[0].numel()
            bias = self.on_disk(name + ".bias") if getattr(module, "bias", None) is not None else None
            found.append(LinearMap(self.on_disk(name + ".weight"), name, bias, transposed, width))
        return found

    def modules(self) -> Mapping[str, nn.Module]:
        return dict(self.model.named_modules())


def _patches(module: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """(examples, positions, channels × window) for a convolution's input."""
    if isinstance(module, nn.Conv1d):
        values = values.unsqueeze(2)
    flat = isinstance(module, nn.Conv1d)
    if isinstance(module.padding, str):
        raise RequestError(f"Reading the patches of a convolution: padding '{module.padding}' is not supported.")
    window, stride, padding, dilation = (
        (fill, *setting) if flat else tuple(setting)
        for fill, setting in (
            (1, module.kernel_size), (1, module.stride), (0, module.padding), (1, module.dilation),
        )
    )  # fmt: skip
    patches = functional.unfold(values, window, dilation, padding, stride)  # type: ignore[arg-type]
    return patches.transpose(1, 2)
