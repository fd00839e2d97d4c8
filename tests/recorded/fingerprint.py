"""A result in a few numbers: a hash of its bits, and what can be compared where bits cannot."""

from __future__ import annotations

import hashlib
import math
import platform
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import transformers
from torch import Tensor

# Relative to the norm of a result. With other instructions of the same processor (AVX-512 for SSE) two thirds of the
# hashes change, but no number by more than 1.5e-5, where gradient steps multiply rounding; nearly all by less than
# 1e-6. A change of the arithmetic that matters, a weight or an order of models say, is far above.
TOLERANCE = 1e-4
# Rounding may move single weights across a threshold (seen: 1.4e-3), or to the next of few digits (seen: 7e-5).
LOOSER = {"arcee_fusion": 1e-2, "bfloat16": 1e-3}
NUMBERS = ("norm", "sum", "projection")


def parts(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | str]]:
    """The leaves of a nested result: tensors, numbers as tensors, and words."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from parts(value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from parts(one, f"{name}/{place}")
    elif isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, str) or value is None:
        yield name, str(value)
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, which has no fingerprint")


def fingerprint(value: Any) -> dict[str, Any]:
    """Hash over names, dtypes, shapes and bytes; norm, sum and one fixed random projection of all values.

    Words count in the hash of the bits and in `words`, which is the same on every machine.
    """
    bits, words = hashlib.sha256(), hashlib.sha256()
    count, squares, total, projection = 0, 0.0, 0.0, 0.0
    for name, part in sorted(parts(value), key=lambda entry: entry[0]):
        if isinstance(part, str):
            bits.update(f"{name} {part}\n".encode())
            words.update(f"{name} {part}\n".encode())
            continue
        head = f"{name} {part.dtype} {tuple(part.shape)}\n".encode()
        bits.update(head)
        words.update(head)
        bits.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        numbers = part.to(torch.float64).reshape(-1).numpy()
        # numpy keeps this stream the same in every version; its place is the name, so that no two parts can swap.
        along = np.random.default_rng(zlib.crc32(name.encode())).random(numbers.size) * 2 - 1
        # fsum: the same whatever the order in which a library would add.
        count += numbers.size
        squares += math.fsum(np.square(numbers))
        total += math.fsum(numbers)
        projection += math.fsum(numbers * along)
    if not count:
        raise ValueError("a result without a number in it proves nothing")
    found = {"norm": math.sqrt(squares), "sum": total, "projection": projection}
    if not all(map(math.isfinite, found.values())):
        raise ValueError("a result that is not finite proves nothing")
    return {"sha256": bits.hexdigest(), "words": words.hexdigest(), "values": count, **found}


def difference(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> float:
    """The largest difference of the numbers, relative to the recorded norm."""
    apart = max(abs(found[key] - recorded[key]) for key in NUMBERS)
    return apart / recorded["norm"] if recorded["norm"] else (math.inf if apart else 0.0)


def tolerance(name: str) -> float:
    return max([TOLERANCE, *(value for part, value in LOOSER.items() if part in name)])


def machine() -> dict[str, str]:
    """What the last bits of a result can depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    settings = torch.__config__.show().splitlines()
    return {
        "processor": processor or platform.processor() or platform.machine(),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        "blas": "; ".join(line.strip(" -") for line in settings if "Math Kernel" in line or "MKL-DNN" in line),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "transformers": transformers.__version__,
    }
