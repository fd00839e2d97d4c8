"""The models that published recipes name: a base, its fine-tunes, an adapter, and one with more tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from models import FAMILY_VOCABULARY, MEMBERS, tensors, words, write_family, write_tokenizer
from peers.real_world import Published


def set_stage(published: Published, folder: Path) -> dict[str, str]:
    """Write the models into `folder`/models; what other names of the recipe and its flags stand for."""
    dtype = getattr(torch, published.dtype)
    models = folder / "models"
    write_family(published.family, models, dtype=dtype)
    for member in MEMBERS if "qwen" in published.family else ():
        # transformers adds this token to tokenizers of this family that do not have it.
        write_tokenizer(models / member, [*words(FAMILY_VOCABULARY - 1), "<|endoftext|>"])
    write_adapter(folder / "adapter", models / "base")
    if "$larger" in published.recipe:
        write_family(published.family, folder / "more-tokens", vocabulary=FAMILY_VOCABULARY + 2, dtype=dtype)
        (folder / "more-tokens" / "b").rename(models / "larger")
        shutil.rmtree(folder / "more-tokens")
        write_tokenizer(models / "larger", [*words(FAMILY_VOCABULARY), "<|im_start|>", "<|im_end|>"])
    return {"adapter": str(folder / "adapter"), "cache": str(folder / "cache")}


def write_adapter(folder: Path, model: Path) -> None:
    """A low-rank change of the queries and values, as peft writes it."""
    folder.mkdir()
    rank = 4
    config = {"peft_type": "LORA", "base_model_name_or_path": str(model), "r": rank, "lora_alpha": 6,
              "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "bias": "none",
              "lora_dropout": 0.0, "fan_in_fan_out": False, "inference_mode": True}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(9)
    factors = {}
    for name, tensor in tensors(model).items():
        if any(name.endswith(f"{target}.weight") for target in config["target_modules"]):
            prefix = "base_model.model." + name.removesuffix(".weight")
            factors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, tensor.shape[1], generator=generator)
            factors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(tensor.shape[0], rank, generator=generator)
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})
