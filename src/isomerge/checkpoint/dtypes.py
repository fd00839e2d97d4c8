"""Dtypes and sizes as users write them, and rounding to the written dtype."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isomerge.errors import RequestError, did_you_mean

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
UNITS = {"": 1}
for power, letter in enumerate("KMGT", start=1):
    UNITS[letter] = UNITS[letter + "B"] = 1000**power
    UNITS[letter + "IB"] = 1024**power

FLOATS: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "f16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "f32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "f64": torch.float64,
    "double": torch.float64,
}


FEWEST = 100
"""Bytes that a text without a unit may stand for: whoever writes 5 means gigabytes."""


def parse_size(size: int | str) -> int:
    """Bytes. GB is 10⁹ as on the hub, GiB is 2³⁰.

    >>> parse_size("5GB"), parse_size("1.5 GiB"), parse_size(1000)
    (5000000000, 1610612736, 1000)
    """
    match = SIZE.fullmatch(str(size).strip()) if not isinstance(size, bool) else None
    unit = match[2].upper() if match else None
    # A lone B is not a unit here: in other merging tools "5B" means billions of parameters, and never 5 bytes.
    if match is None or unit not in UNITS:
        raise RequestError(f"While reading the size '{size}': it is no number with a unit. Write 5GB, 512MB or 1GiB.")
    result = int(float(match[1]) * UNITS[unit]) if "." in match[1] else int(match[1]) * UNITS[unit]
    if result < 1:
        raise RequestError(f"While reading the size '{size}': it is not positive. Write 5GB, 512MB or 1GiB.")
    if isinstance(size, str) and not unit and result < FEWEST:
        raise RequestError(
            f"While reading the size '{size}': without a unit it is {result} bytes, which hold no tensor. Write 5GB, "
            "512MB or 1GiB."
        )
    return result


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating-point dtype that a checkpoint can be written in.

    >>> parse_dtype("bf16"), parse_dtype("torch.float32")
    (torch.bfloat16, torch.float32)
    """
    name = str(dtype).strip().lower().removeprefix("torch.")
    if name not in FLOATS:
        raise RequestError(
            f"While reading the dtype '{dtype}': it is no floating-point type known here. {did_you_mean(name, FLOATS)}"
        )
    return FLOATS[name]


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """As a recipe writes it; a text stays as it was written.

    >>> dtype_name(torch.bfloat16), dtype_name("bf16")
    ('bfloat16', 'bf16')
    """
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


@dataclass(frozen=True)
class CastReport:
    """How many values became infinite (`overflow`) or zero (`underflow`) in a cast, and whether all are finite now; the
    reports of tensors add up."""

    values: int = 0
    overflow: int = 0
    underflow: int = 0
    finite: bool = True

    def __add__(self, other: CastReport) -> CastReport:
        return CastReport(
            self.values + other.values,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            self.finite and other.finite,
        )

    @property
    def lossless(self) -> bool:
        """Whether nothing overflowed or vanished (rounding is another matter)."""
        return not (self.overflow or self.underflow)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, CastReport]:
    """The tensor in another floating-point dtype, and what was lost on the way.

    >>> cast(torch.tensor([1.0, 1e6, 1e-12], dtype=torch.float64), torch.float16)[1]
    CastReport(values=3, overflow=1, underflow=1, finite=False)
    """
    if not dtype.is_floating_point or not tensor.is_floating_point():
        raise RequestError(
            f"While casting from {tensor.dtype} to {dtype}: both must be floating-point. Keep integers as they are."
        )
    result = tensor.to(dtype)
    count, bits = tensor.numel(), _magnitudes(result)
    if not count:
        return result, CastReport()
    finite = _all_finite(result, bits)
    if dtype == tensor.dtype or torch.finfo(dtype).bits > torch.finfo(tensor.dtype).bits:
        return result, CastReport(count, finite=finite)  # a wider type loses nothing, so there is nothing to count
    # Only what became zero or infinite is looked at again: hardly anything, where all is as it should be.
    overflow = 0 if finite else int((tensor.isfinite() & ~result.isfinite()).sum())
    return result, CastReport(count, overflow, _vanished(tensor, result, bits), finite)


def _all_finite(tensor: torch.Tensor, bits: np.ndarray | None) -> bool:
    if bits is not None:  # the largest magnitude tells it in half the time of a sum
        infinity = torch.tensor(math.inf, dtype=tensor.dtype).view(torch.int16)
        return bool(bits.max() < int(infinity))
    # A finite sum has only finite terms; finite terms may overflow, so otherwise look closer.
    return math.isfinite(float(tensor.sum(dtype=torch.float32))) or bool(tensor.isfinite().all())


def _vanished(before: torch.Tensor, after: torch.Tensor, bits: np.ndarray | None) -> int:
    """How many values became zero."""
    if bits is not None and np.count_nonzero(bits) == bits.size:
        return 0
    zeros = (after == 0).reshape(-1) if bits is None else torch.from_numpy(np.flatnonzero(bits == 0))
    return int(before.reshape(-1)[zeros].count_nonzero())


def _magnitudes(tensor: torch.Tensor) -> np.ndarray | None:
    """Values of 16 bits without their signs as integers, which have the same order and are counted five times as fast;
    None of others, and where torch does not show its memory so."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.element_size() != 2:
        return None
    bits: np.ndarray = tensor.view(torch.int16).numpy() & np.int16(0x7FFF)
    return bits


def dtype_entry(config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, str]:
    """The entry of config.json for another dtype, under the key the donor uses; nothing where the dtype stays.

    >>> dtype_entry({"torch_dtype": "float32"}, torch.bfloat16)
    {'torch_dtype': 'bfloat16'}
    """
    if dtype is None or "_class_name" in config:  # of diffusers, whose files alone say their dtype
        return {}
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: str(dtype).removeprefix("torch.")}
