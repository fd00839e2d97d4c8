"""What config.json calls the sizes of a model, over all families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STREAM = ("hidden_size", "n_embd", "d_model", "dim")
UNITS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
GROUPS = ("num_key_value_heads",)
HEAD_SIZE = ("head_dim", "d_kv")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
LIKE_STREAM = ("word_embed_proj_dim", "embedding_size")
"""Widths of tables that are projected to the stream where they differ from it."""


STREAM_IN_NUMBERS = ("gemma", "gemma2", "gemma3_text", "gemma3", "t5", "mt5")
"""Model types that multiply by a power of the stream's width somewhere in their code: it has to stay as it is."""


def key_of(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The one of these names that a config.json has; GPT-2 need not name its feed-forward."""
    known = next((name for name in names if name in config), None)
    return "n_inner" if known is None and names == UNITS and "n_embd" in config else known


def resized(config: Mapping[str, Any], sizes: Mapping[tuple[str, ...], int]) -> dict[str, Any]:
    """The entries of a config.json for a model that has other sizes, by the names above; `HEAD_SIZE` stays, and is
    given for families that would otherwise divide the stream by the number of heads."""
    changes = {
        key: size for names, size in sizes.items() if names != HEAD_SIZE and (key := key_of(config, names)) is not None
    }
    if STREAM in sizes:
        old = config.get(key_of(config, STREAM) or "")
        changes |= {name: sizes[STREAM] for name in LIKE_STREAM if name in config and config[name] == old}
    if HEAD_SIZE in sizes and key_of(config, HEAD_SIZE) is None:
        new = {**config, **changes}
        stream, heads = (new[key] if (key := key_of(new, names)) else 0 for names in (STREAM, HEADS))
        changes |= {"head_dim": sizes[HEAD_SIZE]} if stream != heads * sizes[HEAD_SIZE] else {}
    return {key: size for key, size in changes.items() if config.get(key) != size}
