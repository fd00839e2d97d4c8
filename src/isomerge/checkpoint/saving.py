"""What every writer of a whole model does: say the dtype in config.json, and count bytes for whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from isomerge.checkpoint.base import TensorInfo


def dtype_entry(config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, str]:
    """The entry of config.json for another dtype, under the key the donor uses; nothing where the dtype stays.

    >>> dtype_entry({"torch_dtype": "float32"}, torch.bfloat16)
    {'torch_dtype': 'bfloat16'}
    """
    if dtype is None:
        return {}
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: str(dtype).removeprefix("torch.")}


def counted(
    progress: Callable[[int, int, str], None] | None, plan: Mapping[str, TensorInfo], what: str
) -> Callable[[int], None]:
    """Turns the writer's pieces into `progress(done, total, what)`."""
    total, done = sum(info.nbytes for info in plan.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total, what)

    return advance
