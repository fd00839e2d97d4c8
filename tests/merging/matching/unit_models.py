"""Tiny models whose feed-forwards are copies, in another order or their own; and what the stock class makes of it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor

import models as tiny


def feed_forwards(folder: Path) -> list[tuple[list[str], str]]:
    """For each layer of a ViT or Llama: the tensors whose rows are units, and the one whose columns are."""
    names = sorted(tiny.tensors(folder))
    found = []
    for layer in range(2):
        own = [n for n in names if f".{layer}." in n and "attention" not in n and "attn" not in n]
        down = next(n for n in own if n.endswith(("output.dense.weight", "down_proj.weight")))
        up = [n for n in own if "intermediate.dense" in n or "gate_proj" in n or "up_proj" in n]
        found.append((up, down))
    return found


def copied(folder: Path) -> Path:
    return tiny.variant(folder, {}, "copy")


def reordered(folder: Path, seed: int = 0) -> Path:
    """The same function with the units of every feed-forward in another order."""
    draw, state, changed = torch.Generator().manual_seed(seed), tiny.tensors(folder), {}
    for up, down in feed_forwards(folder):
        order = torch.randperm(state[down].shape[1], generator=draw)
        changed |= {name: state[name][order] for name in up} | {down: state[down][:, order]}
    return tiny.variant(folder, changed, f"reordered-{seed}")


def with_other_units(folder: Path, other: Path) -> Path:
    """A model with the feed-forwards of another one of its shape."""
    state = tiny.tensors(other)
    names = [name for up, down in feed_forwards(folder) for name in (*up, down)]
    return tiny.variant(folder, {name: state[name] for name in names}, f"with-units-of-{other.name}")


def hidden(folder: Path, layer: int, inputs: Tensor) -> Tensor:
    """What the feed-forward of a layer makes of inputs, in the stock class."""
    stock = getattr(transformers, tiny.read_config(folder)["architectures"][0])
    loaded, info = stock.from_pretrained(folder, dtype=torch.float64, output_loading_info=True, local_files_only=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    (name,) = [n for n, _ in loaded.named_modules() if n.endswith(f"layers.{layer}.mlp")]
    with torch.no_grad():
        return loaded.eval().get_submodule(name)(inputs)
