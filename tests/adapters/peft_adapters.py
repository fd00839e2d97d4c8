"""Real PEFT adapters with random factors, and what PEFT itself makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from isomerge.checkpoint.memory import quiet_transformers


def load_base(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    import json

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    with quiet_transformers():
        return getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()


def save_adapter(base: Path, folder: Path, config: LoraConfig, *, seed: int = 1, std: float = 0.2) -> Path:
    """A PEFT adapter whose trainable parameters are all random, as after training."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(base), config)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=std)
                if "magnitude" in name:
                    parameter.data.abs_().add_(0.5)
        model.save_pretrained(folder)
    return folder


def load_adapted(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load_base(base, dtype), adapter, autocast_adapter_dtype=False).to(dtype).eval()


def merged_by_peft(base: Path, adapter: Path, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What PEFT's own merge gives, under the names on disk."""
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        load_adapted(base, adapter, dtype).merge_and_unload().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        if model.config.model_type == "vit":
            return model(pixel_values=torch.randn(2, 3, 8, 8, generator=generator).to(model.dtype)).logits
        return model(input_ids=torch.randint(0, 40, (2, 9), generator=generator)).logits
