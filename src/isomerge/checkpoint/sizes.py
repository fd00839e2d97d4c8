"""The sizes of two models, as their config.json give them: shorter to read than a list of tensors."""

from __future__ import annotations

from isomerge.checkpoint.base import Checkpoint

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
OTHERS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")


def differences_in_size(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Every size that both configs name and that is not the same, in words."""
    names = {key: f"different depth: {key}" for key in DEPTH_KEYS}
    names |= {key: f"different width: {key}" for key in WIDTH_KEYS}
    names |= {key: key for key in OTHERS}
    found = []
    for key, said in names.items():
        one, other = first.config.get(key), second.config.get(key)
        if None not in (one, other) and one != other:
            found.append(f"{said} is {one} and {other}")
    return found
