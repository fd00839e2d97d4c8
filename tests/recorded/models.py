"""Tiny random models on disk, made by the stock classes alone, and data for them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from architectures.rows import ROWS, VOCABULARY

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SPREAD = 0.05  # of what fine-tuning moves a model by, relative to the random part of its weights


@lru_cache(maxsize=1)
def scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="isomerge-results-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def noise_into(model: Any, seed: int, scale: float = 1.0) -> None:
    """Move every parameter, so that no gain is one and no bias zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            noise = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5 * noise.tanh()
            parameter += scale * noise


@cache
def model(
    row: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tuned: int | None = None,
    spread: float = SPREAD,
    changes: tuple[tuple[str, Any], ...] = (),
) -> str:
    """The folder of a random model of the table of architectures; `tuned` names one that was fine-tuned from it."""
    entry = ROWS[row]
    stock = getattr(transformers, entry.model)
    torch.manual_seed(seed)
    made = stock._from_config(stock.config_class(**{**entry.config, **dict(changes)}), dtype=torch.float64).eval()
    noise_into(made, 1000 + seed)
    if tuned is not None:
        noise_into(made, 2000 + tuned, spread)
    width = "-".join(str(value) for _, value in changes)
    name = f"{row}-{seed}-{str(dtype).removeprefix('torch.')}-{tuned}-{spread}-{width}"
    made.to(dtype).save_pretrained(scratch() / name)
    return str(scratch() / name)


def tuned(row: str, count: int = 3, dtype: torch.dtype = torch.float32, **more: Any) -> list[str]:
    """Models that were fine-tuned from `model(row)`."""
    return [model(row, 0, dtype, number, **more) for number in range(count)]


@cache
def batches(row: str, seed: int = 0, count: int = 2, size: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """Random images or sentences with labels; the last sentences of every batch are padded."""
    entry = ROWS[row]
    generator = torch.Generator().manual_seed(500 + seed)
    found: list[dict[str, Tensor]] = []
    for _ in range(count):
        if entry.kind == "image":
            pixels = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
            found.append({"pixel_values": pixels, "labels": torch.randint(0, 5, (size,), generator=generator)})
            continue
        tokens = torch.randint(3, VOCABULARY, (size, 9), generator=generator)
        mask = torch.ones_like(tokens)
        tokens[-2:, -3:], mask[-2:, -3:] = 0, 0
        drawn = torch.randint(0, 5, tokens.shape, generator=generator) if "token" in row else tokens
        found.append(
            {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), drawn, -100)}
        )  # fmt: skip
    return found


def without_labels(given: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: tensor for name, tensor in batch.items() if name != "labels"} for batch in given]


def settled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the biases of keys: they change no output, so that their gradients are rounding errors and nothing else.

    What is weighed by the squares of those (Fisher information) is decided by the processor.
    """
    found = {}
    for name, tensor in state.items():
        if name.endswith(("key.bias", "k_proj.bias")):
            continue
        if name.endswith("c_attn.bias"):  # queries, keys and values in one
            query, _, value = tensor.chunk(3)
            tensor = torch.cat([query, value])
        found[name] = tensor
    return found
