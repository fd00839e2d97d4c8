"""The linear maps of a stock module: where their weights are in memory and what they are called on disk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from isomerge.adapters.layout import TRANSPOSED, ModuleLayout
from isomerge.errors import RequestError


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
        return _patches(module, values) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else values


def linear_maps(model: nn.Module, layout: ModuleLayout) -> list[LinearMap]:
    """Every linear map that is a module of its own (experts that are one stacked tensor are not)."""
    maps = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim < 2 or isinstance(module, nn.Embedding):
            continue
        if isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups > 1:
            continue  # several small maps in one tensor, none of which sees the whole input
        transposed = type(module).__name__ == TRANSPOSED
        width = weight.shape[0] if transposed else weight[0].numel()
        # A tensor that is not stored keeps its own name.
        stored, bias = (layout.on_disk.get(f"{name}.{part}", f"{name}.{part}") for part in ("weight", "bias"))
        has_bias = getattr(module, "bias", None) is not None
        maps.append(LinearMap(stored, name, bias if has_bias else None, transposed, width))
    return maps


def outputs_as_rows(module: nn.Module, made: Tensor) -> Tensor:
    """What a map makes, with the channels of a convolution last: (…, out)."""
    return made.flatten(2).transpose(1, 2) if isinstance(module, (nn.Conv1d, nn.Conv2d)) else made


def _patches(module: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """(examples, positions, channels × window) for a convolution's input."""
    flat = isinstance(module, nn.Conv1d)
    if flat:
        values = values.unsqueeze(2)
    if isinstance(module.padding, str):
        raise RequestError(f"Reading the patches of a convolution: padding '{module.padding}' is not supported.")
    window, stride, padding, dilation = (
        (fill, *setting) if flat else tuple(setting)
        for fill, setting in (
            (1, module.kernel_size), (1, module.stride), (0, module.padding), (1, module.dilation),
        )
    )  # fmt: skip
    patches = functional.unfold(values, window, dilation, padding, stride)
    return patches.transpose(1, 2)
