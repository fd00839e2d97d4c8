"""Tiny pipelines of diffusers with random weights: the classes and the structure are the real ones, the widths not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

diffusers.logging.set_verbosity_error()
TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
        "max_position_embeddings": 12, "projection_dim": 16, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1}  # fmt: skip


def unet(**changes: Any) -> Any:
    """SDXL's: three levels, attention in two, a middle block, sizes and crops embedded beside the time."""
    return diffusers.UNet2DConditionModel(**{
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 2, "transformer_layers_per_block": (1, 2, 2), "attention_head_dim": (1, 2, 2),
        "cross_attention_dim": 32, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64, "use_linear_projection": True, "norm_num_groups": 4, **changes,
    })  # fmt: skip


def vae() -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, sample_size=16,
    )  # fmt: skip


def flux(**changes: Any) -> Any:
    """Blocks that see text and image apart, then blocks that see both."""
    return diffusers.FluxTransformer2DModel(**{
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16, "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4), **changes,
    })  # fmt: skip


def tokenizer(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *(letter + "</w>" for letter in letters[:12]), *letters]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=12)


def save_xl(folder: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32, shard: str = "10GB") -> Any:
    torch.manual_seed(seed)
    config = transformers.CLIPTextConfig(**TEXT)
    words = tokenizer(folder.parent / "words")
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=vae(), unet=unet(), text_encoder=transformers.CLIPTextModel(config),
        text_encoder_2=transformers.CLIPTextModelWithProjection(config), tokenizer=words, tokenizer_2=words,
        scheduler=diffusers.EulerDiscreteScheduler(),
    ).to(dtype)  # fmt: skip
    pipeline.save_pretrained(folder, max_shard_size=shard)
    return pipeline


def components(pipeline: Any) -> dict[str, dict[str, torch.Tensor]]:
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    return {name: module.state_dict() for name, module in modules.items()}
