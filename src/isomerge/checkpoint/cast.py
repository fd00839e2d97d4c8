"""Rounding to the written dtype, with a count of what did not survive it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from isomerge.errors import RequestError

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CastReport:
    """How many values became infinite (`overflow`) or zero (`underflow`) in a cast; reports of tensors add up."""

    values: int = 0
    overflow: int = 0
    underflow: int = 0

    def __add__(self, other: CastReport) -> CastReport:
        return CastReport(self.values + other.values, self.overflow + other.overflow, self.underflow + other.underflow)

    @property
    def lossless(self) -> bool:
        """Whether nothing overflowed or vanished (rounding is another matter)."""
        return not (self.overflow or self.underflow)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, CastReport]:
    """The tensor in another floating-point dtype, and what was lost on the way.

    >>> cast(torch.tensor([1.0, 1e6, 1e-12], dtype=torch.float64), torch.float16)[1]
    CastReport(values=3, overflow=1, underflow=1)
    """
    if not dtype.is_floating_point or not tensor.is_floating_point():
        raise RequestError(
            f"While casting from {tensor.dtype} to {dtype}: both must be floating-point. Keep integers as they are."
        )
    result = tensor.to(dtype)
    if not tensor.numel() or dtype == tensor.dtype or torch.finfo(dtype).bits > torch.finfo(tensor.dtype).bits:
        return result, CastReport(tensor.numel())  # a wider type loses nothing, so there is nothing to count
    # The smallest and the largest magnitude tell the usual case in one pass; only others are counted.
    magnitudes = tensor.abs()
    smallest, largest = (float(end) for end in magnitudes.aminmax())
    overflow = underflow = 0
    if not smallest >= torch.finfo(dtype).smallest_normal:
        underflow = _nonzero(magnitudes) - _nonzero(result.abs())
    if not largest <= torch.finfo(dtype).max:
        overflow = int((tensor.isfinite() & ~result.isfinite()).sum())
    return result, CastReport(tensor.numel(), overflow, underflow)


def _nonzero(magnitudes: torch.Tensor) -> int:
    """How many are not zero. As integers they are counted five times as fast, and no magnitude is a negative zero."""
    if magnitudes.device.type != "cpu" or not magnitudes.is_contiguous():
        return int(magnitudes.count_nonzero())
    return int(np.count_nonzero(magnitudes.view(INTEGERS[magnitudes.element_size()]).numpy()))
