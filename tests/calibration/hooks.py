"""What a stock model's layers see, by plain hooks: the truth that the passes over data are compared with.

Nothing here uses isomerge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from models import VOCABULARY, read_config, tensors

Batch = dict[str, Tensor]
EXAMPLES = 6


def stock(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    settings = read_config(folder)
    made = getattr(transformers, settings["architectures"][0])
    extra = {"experts_implementation": "eager"} if "num_local_experts" in settings else {}
    return made.from_pretrained(folder, dtype=dtype, local_files_only=True, **extra).eval()


def data(folder: Path, seed: int = 0, examples: int = EXAMPLES, labels: bool = False) -> Batch:
    """Some examples of the right kind; text is padded, every example to another length."""
    config, generator = read_config(folder), torch.Generator().manual_seed(100 + seed)
    if "image_size" in config:
        size = config["image_size"]
        found = {"pixel_values": torch.randn(examples, 3, size, size, generator=generator, dtype=torch.float64)}
        if labels:
            found["labels"] = torch.randint(0, 5, (examples,), generator=generator)
        return found
    length = 8
    tokens = torch.randint(3, VOCABULARY, (examples, length), generator=generator)
    mask = (torch.arange(length) < (length - torch.arange(examples)[:, None] % 4)).long()
    found = {"input_ids": tokens * mask, "attention_mask": mask}
    if config.get("is_encoder_decoder"):
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (examples, length), generator=generator)
        keep = (torch.arange(length) < (length - torch.arange(examples)[:, None] % 3)).long()
        found["decoder_attention_mask"] = keep
    if labels:
        classes = len(config.get("id2label", {})) if "ForTokenClassification" in config["architectures"][0] else None
        drawn = torch.randint(0, classes, (examples, length), generator=generator) if classes else tokens
        found["labels"] = torch.where(mask.bool(), drawn, -100)
    return found


def batches(batch: Batch, *sizes: int) -> Callable[[], Iterator[Batch]]:
    """The examples in batches of these sizes; all at once without any."""

    def give() -> Iterator[Batch]:
        start = 0
        for size in sizes or (len(next(iter(batch.values()))),):
            yield {name: tensor[start : start + size] for name, tensor in batch.items()}
            start += size

    return give


def inputs_by_module(model: Any, batch: Batch) -> dict[str, Tensor]:
    """What every layer with a matrix read, as it was given to it."""
    seen: dict[str, Tensor] = {}

    def remember(name: str, values: Tensor) -> None:
        seen.setdefault(name, values.detach())

    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: remember(name, args[0]))
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
        and module.weight.ndim > 1
        and not isinstance(module, nn.Embedding)
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def disk_name(model: Any, module: str, folder: Path) -> str | None:
    """By value: the stored tensor that a module's weight is."""
    weight = model.get_submodule(module).weight.detach()
    for name, tensor in tensors(folder).items():
        if tensor.shape == weight.shape and torch.equal(tensor.to(weight.dtype), weight):
            return name
    return None


def rows(values: Tensor, batch: Batch, module: str) -> np.ndarray:
    """The rows of real examples, one per position that is not padding."""
    mask = batch.get("attention_mask")
    if module.startswith("decoder.") or module == "lm_head":
        cross = "EncDecAttention" in module and module.endswith((".k", ".v"))
        mask = mask if cross or "decoder_attention_mask" not in batch else batch["decoder_attention_mask"]
    flat = values.reshape(-1, values.shape[-1])
    if mask is not None and flat.shape[0] == mask.numel():
        flat = flat[mask.reshape(-1).bool()]
    return flat.double().numpy()


def patches(images: Tensor, size: int) -> np.ndarray:
    """(images × patches, channels × size × size), by slicing."""
    found = [
        images[:, :, y : y + size, x : x + size].reshape(len(images), -1)
        for y in range(0, images.shape[2], size)
        for x in range(0, images.shape[3], size)
    ]
    return torch.cat(found).double().numpy()
