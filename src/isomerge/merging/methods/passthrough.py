"""One model, as it is."""

from __future__ import annotations

from torch import Tensor

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(most=1)
def passthrough(group: TensorGroup, *, scale: PerModel[float | None] = each(None)) -> Combine:
    """The only model's tensors, unchanged or multiplied by a number: for stacking layers of several models.

    Options:
        scale: what to multiply by; none leaves every bit as it is
    """

    def combine(block: RowBlock) -> Tensor:
        tensor = block.tensors[0]
        return tensor if scale[0] is None else tensor * scale[0]

    return combine
