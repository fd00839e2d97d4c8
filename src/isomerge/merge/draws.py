"""Random numbers that depend on a seed, a tensor's name and an element's place, and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from isomerge.merge.group import Block, Group

LEVELS = 2**16  # one number takes 16 bits: four times as fast as a float, and finer than any tensor can tell
PER_WORD = 4
PER_COUNT = 16  # Philox gives four 64-bit words a count


def uniform(group: Group, block: Block, stream: int) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2⁻¹⁶, for the rows of one model (`stream` is its index)."""
    drawn = _integers(group, block, stream).astype(np.float32) / LEVELS
    return torch.from_numpy(drawn).reshape(block.tensors[0].shape).to(block.tensors.device)


def chosen(group: Group, block: Block, stream: int, density: float) -> Tensor:
    """True where an element of one model (`stream` is its index) is kept, each by itself with probability `density`."""
    kept = _integers(group, block, stream) < np.uint16(min(max(1, round(density * LEVELS)), LEVELS - 1))
    return torch.from_numpy(kept).reshape(block.tensors[0].shape).to(block.tensors.device)


def _integers(group: Group, block: Block, stream: int) -> np.ndarray:
    """16 random bits an element from a counter-based generator: neither threads nor the order of tensors, nor the size
    of the blocks, changes what an element draws."""
    key = hashlib.sha256(f"{group.seed}\0{group.name}\0{stream}".encode()).digest()[:16]
    generator = np.random.Philox(key=np.frombuffer(key, dtype=np.uint64), counter=block.start // PER_COUNT)
    skip, count = block.start % PER_COUNT, block.tensors[0].numel()
    words = generator.random_raw((skip + count + PER_WORD - 1) // PER_WORD)
    return words.astype("<u8", copy=False).view("<u2")[skip : skip + count]
