"""Random numbers that depend on a seed, a tensor's name and an element's place, and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from isomerge.merging.run.rows import RowBlock, TensorGroup

LEVELS = 2**16  # one number takes 16 bits: four times as fast as a float, and finer than any tensor can tell
WORDS = 4  # Philox gives four of 64 bits a count
RARE = 1 / 64


def uniform(group: TensorGroup, block: RowBlock, stream: int) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2⁻¹⁶, for the rows of one model (`stream` is its index)."""
    drawn = _integers(group, block, stream).astype(np.float32) / LEVELS
    return torch.from_numpy(drawn).reshape(block.tensors[0].shape).to(block.tensors.device)


def chosen(group: TensorGroup, block: RowBlock, stream: int, density: float) -> Tensor:
    """True where an element of one model (`stream` is its index) is kept, each by itself with probability `density`."""
    # Near 0 and 1 the steps of 16 bits would be felt: there a number takes 32.
    bits = 16 if RARE < density < 1 - RARE else 32
    least = min(max(1, round(density * 2**bits)), 2**bits - 1)
    kept = _integers(group, block, stream, bits) < np.dtype(f"u{bits // 8}").type(least)
    return torch.from_numpy(kept).reshape(block.tensors[0].shape).to(block.tensors.device)


def normal(group: TensorGroup, block: RowBlock, stream: int) -> Tensor:
    """Numbers of the standard normal distribution, in float64."""
    drawn = (_integers(group, block, stream, bits=32).astype(np.float64) + 0.5) / 2**32
    normal: Tensor = torch.special.ndtri(torch.from_numpy(drawn))
    return normal.reshape(block.tensors[0].shape).to(block.tensors.device)


def normal_for_all(seed: int, count: int) -> list[float]:
    """The same numbers of the standard normal distribution for every tensor."""
    key = hashlib.sha256(f"{seed}\0for all tensors".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
    drawn: list[float] = generator.standard_normal(count).tolist()
    return drawn


def _integers(group: TensorGroup, block: RowBlock, stream: int, bits: int = 16) -> np.ndarray:
    """Random bits for every element from a counter-based generator: neither threads nor the order of tensors, nor the
    size of the blocks, changes what an element draws."""
    key = hashlib.sha256(f"{group.seed}\0{group.name}\0{stream}".encode()).digest()[:16]
    per_word = 64 // bits
    per_count = WORDS * per_word
    generator = np.random.Philox(key=np.frombuffer(key, dtype=np.uint64), counter=block.start // per_count)
    skip, count = block.start % per_count, block.tensors[0].numel()
    words = generator.random_raw((skip + count + per_word - 1) // per_word)
    return words.astype("<u8", copy=False).view(f"<u{bits // 8}")[skip : skip + count]
