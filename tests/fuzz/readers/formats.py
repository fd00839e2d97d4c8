"""Weights of other programs: GGUF, FP8 and MXFP4, pipelines of diffusers, LoRA files of diffusion models."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import torch

from fuzz import mutators as m
from fuzz.readers.registry import Seed, reader, stored


@cache
def _gguf() -> bytes:
    import gguf

    from gguf_files import write_gguf
    from models import scratch

    path = scratch() / "fuzzed.gguf"
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf("llama", path, qtype=kind, hidden_size=64, intermediate_size=32, vocab_size=40, num_hidden_layers=1)
    return path.read_bytes()


def _mostly_header(content: bytes, rng: random.Random) -> bytes:
    """Nine tenths of the file are values, any of which is some weight."""
    end = rng.choice([64, 900, 2200, len(content)])
    return m.mutate_bytes(content[:end], rng) + content[end:]


@reader("gguf", lambda: [{"model.gguf": _gguf()}], {"model.gguf": _mostly_header})
def read_gguf(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    opened = open_checkpoint(folder / "model.gguf")
    for name in opened.tensors:
        opened.read(name)


def _quantised() -> list[Seed]:
    weight = torch.ones(8, 8).to(torch.float8_e4m3fn)
    eight = {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 2), "b.weight": torch.ones(4)}
    four = {"e_blocks": torch.ones(2, 3, 1, 16, dtype=torch.uint8), "e_scales": torch.ones(2, 3, 1, dtype=torch.uint8)}
    blocks = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
    return [
        {"model.safetensors": stored(tensors), "config.json": json.dumps({"quantization_config": said}).encode()}
        for tensors, said in ((eight, blocks), (four, {"quant_method": "mxfp4"}))
    ]


@reader("block scales", _quantised, {"config.json": m.mutate_json, "model.safetensors": m.mutate_safetensors})
def read_block_scales(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    opened = open_checkpoint(folder)
    for name in opened.tensors:
        opened.read(name)


def _pipelines() -> list[Seed]:
    index = {"_class_name": "P", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "none": [None, None]}
    weights = stored({"a.weight": torch.ones(2, 2)}, {"format": "pt"})
    return [
        {"model_index.json": json.dumps(index).encode(), "unet/diffusion_pytorch_model.safetensors": weights,
         "unet/config.json": b"{}", "vae/diffusion_pytorch_model.safetensors": weights}
    ]  # fmt: skip


@reader(
    "pipeline", _pipelines,
    {"model_index.json": m.mutate_json, "unet/diffusion_pytorch_model.safetensors": m.mutate_safetensors},
)  # fmt: skip
def read_pipeline(folder: Path) -> None:
    from isomerge.checkpoint import open_checkpoint

    opened = open_checkpoint(folder)
    opened.side_files()
    for name in opened.tensors:
        opened.read(name)


def _loras() -> list[Seed]:
    said = json.dumps({"unet.lora_alpha": 4, "unet.alpha_pattern": {"b": 2}, "unet.use_rslora": False})
    lora = {"unet.a.lora_A.weight": torch.ones(2, 4), "unet.a.lora_B.weight": torch.ones(4, 2)}
    half = {f"lora_unet_b.hada_w{i}_{s}": torch.ones((4, 2) if s == "a" else (2, 4)) for i in (1, 2) for s in "ab"}
    kron = {"lora_unet_b.lokr_w1": torch.ones(2, 2), "lora_unet_b.lokr_w2": torch.ones(2, 2),
            "lora_unet_b.alpha": torch.tensor(2.0)}  # fmt: skip
    return [{"lora.safetensors": stored(one, {"lora_adapter_metadata": said})} for one in (lora, half, kron)]


@reader("diffusion lora", _loras, {"lora.safetensors": m.mutate_safetensors})
def read_diffusion_lora(folder: Path) -> None:
    from isomerge.adapters.diffusion import apply_diffusion_adapter
    from isomerge.checkpoint import open_checkpoint

    base = open_checkpoint({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)})
    tuned = apply_diffusion_adapter(base, folder / "lora.safetensors", "tuned")
    for name in tuned.tensors:
        tuned.read(name)
