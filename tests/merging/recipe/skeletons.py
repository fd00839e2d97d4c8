"""Checkpoints with nothing but names, shapes and a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.merging.plan.tensor_plan import RecipePlan
from isomerge.merging.plan.tensors import plan_tensors
from isomerge.merging.recipe import Recipe, load_recipe

LAYER = (
    "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm", "self_attn.k_proj",
    "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj",
)  # fmt: skip


def state(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(*shape) for name, shape in shapes.items()}


def decoder_shapes(depth: int = 5, width: int = 8, words: int = 16, head: bool = True) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (words, width), "model.norm.weight": (width,)}
    if head:
        found["lm_head.weight"] = (words, width)
    for i in range(depth):
        for part in LAYER:
            found[f"model.layers.{i}.{part}.weight"] = (width,) if "norm" in part else (width, width)
    return found


def decoder(depth: int = 5, width: int = 8, words: int = 16, head: bool = True, **config: Any) -> Checkpoint:
    given = {"num_hidden_layers": depth, "vocab_size": words, "tie_word_embeddings": not head, **config}
    return open_checkpoint(state(decoder_shapes(depth, width, words, head)), config=given, name="tiny")


def checkpoint(shapes: Mapping[str, Sequence[int]], **config: Any) -> Checkpoint:
    return open_checkpoint(state(shapes), config=config, name="tiny")


def recipe(text: str) -> Recipe:
    (found,) = load_recipe(text)
    return found


def plan(text: str, models: Mapping[str, Checkpoint] | None = None) -> RecipePlan:
    """Plan a recipe; models that are not given are plain decoders of five layers."""
    read = recipe(text)
    known = models or {}
    return plan_tensors(read, {m: known.get(str(m)) or decoder() for m in read.referenced_models()})
