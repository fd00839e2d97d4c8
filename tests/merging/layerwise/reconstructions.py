"""Random calibration data for the tiny models, and how far a model's outputs are from the mean of its parents'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isomerge
import models as tiny
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.evaluation.probe import outputs
from isomerge.merging.outcome.merged import Merged
from isomerge.running.stock import load_stock
from isomerge.symmetry.moved import scrambled

Data = list[dict[str, Tensor]]


def data(like: Path, count: int = 4, seed: int = 0, *, size: int = 24, length: int = 12) -> Data:
    """Batches with padding at the end of some sequences."""
    config = load(like).config
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        if hasattr(config, "image_size"):
            shape = (3 * size, config.num_channels, config.image_size, config.image_size)
            found.append({"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)})
            continue
        tokens = torch.randint(3, config.vocab_size, (size, length), generator=generator)
        mask = torch.ones_like(tokens)
        tokens[-3:, -4:], mask[-3:, -4:] = config.pad_token_id, 0
        batch = {"input_ids": tokens, "attention_mask": mask}
        if config.is_encoder_decoder:
            batch["decoder_input_ids"] = torch.randint(3, config.vocab_size, (size, length - 2), generator=generator)
        found.append(batch)
    return found


def again(batches: Data) -> Callable[[], Iterator[dict[str, Tensor]]]:
    return lambda: iter(batches)


def load(like: Path, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float64, **config: Any):
    return load_stock({**tiny.read_config(like), **config}, state or tiny.tensors(like), dtype=dtype)


def features(model: Any, batches: Data) -> Tensor:
    return torch.cat([outputs(model, batch) for batch in batches])


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / first.norm())


def moved(folder: Path, seed: int) -> Path:
    """The same function with other weights: a random element of every symmetry."""
    move = scrambled(describe(open_checkpoint(folder)), seed)
    return tiny.variant(folder, dict(move.produce(move.plan(None), lambda *_: None)), f"moved-{seed}")


def reconstruct(models: Sequence[Any], batches: Any, *, align: Any = True, **options: Any) -> Merged:
    """The public call on batches; with `align` the weights decide. Copies of a model are models of their own. Goals
    and features are the mean unless others are named, and the merge is what is polished: random models are not experts
    of anything."""
    align = {"evidence": "weights"} if align is True else align
    if options.setdefault("method", "reconstruct") == "reconstruct":
        options = {"goals": "mean", "features": "mean", "start": "merge", **options}
    opened = [open_checkpoint(model) for model in models]
    return isomerge.merge(opened, **options, data=batches, align=align)
