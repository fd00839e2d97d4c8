"""Data for tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

Batches = Callable[[], Iterator[dict[str, Tensor]]]


def batches(folder: Path, count: int = 4, size: int = 8) -> Batches:
    """Random pixels or tokens, the same at every call."""
    config = transformers.AutoConfig.from_pretrained(folder)

    def fresh() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(count):
            if hasattr(config, "image_size"):
                shape = (size, config.num_channels, config.image_size, config.image_size)
                yield {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
            else:
                tokens = torch.randint(3, config.vocab_size, (size, 9), generator=generator)
                yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    return fresh
