"""Sizes and dtypes as people write them."""

from __future__ import annotations

import re

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
