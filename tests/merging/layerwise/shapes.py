"""Models of another shape that compute what one does: units twice at half the weight, layers that add nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import models as tiny

State = dict[str, Tensor]


def wider(folder: Path, *, stream: int = 1, units: int = 1, heads: int = 1) -> tuple[State, dict[str, int]]:
    """A Llama with everything in it so many times; RMSNorm sees the same mean of squares."""
    config, found = tiny.read_config(folder), {}
    kv, size = config["num_key_value_heads"], config["head_dim"]

    def times(tensor: Tensor, axis: int, count: int, *, shared: bool = False) -> Tensor:
        return torch.cat([tensor / count if shared else tensor] * count, axis)

    for name, tensor in tiny.tensors(folder).items():
        if "embed_tokens" in name:
            tensor = times(tensor, 1, stream)
        elif "norm" in name:
            tensor = times(tensor, 0, stream)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = times(times(tensor, 1, heads if "o_proj" in name else units, shared=True), 0, stream)
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor = times(times(tensor, 0, units), 1, stream, shared=True)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = times(times(tensor, 0, heads), 1, stream, shared=True)
        else:
            tensor = times(tensor, 1, stream, shared=True)  # the output map
        found[name] = tensor
    assert found["model.layers.0.self_attn.k_proj.weight"].shape[0] == heads * kv * size
    changes = {
        "hidden_size": stream * config["hidden_size"], "intermediate_size": units * config["intermediate_size"],
        "num_attention_heads": heads * config["num_attention_heads"], "num_key_value_heads": heads * kv,
    }  # fmt: skip
    return found, changes


def ungrouped(folder: Path) -> tuple[State, dict[str, int]]:
    """A Llama whose every query has a key and a value of its own."""
    config, found = tiny.read_config(folder), tiny.tensors(folder)
    kv, size, each = config["num_key_value_heads"], config["head_dim"], config["num_attention_heads"]
    for name, tensor in found.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            parts = tensor.reshape(kv, size, -1).repeat_interleave(each // kv, 0)
            found[name] = parts.reshape(each * size, -1)
    return found, {"num_key_value_heads": each}


def deeper(folder: Path, after: int) -> tuple[State, dict[str, int]]:
    """With one more layer, which adds nothing to the stream."""
    config, found = tiny.read_config(folder), {}
    for name, tensor in tiny.tensors(folder).items():
        if not name.startswith("model.layers."):
            found[name] = tensor
            continue
        layer, rest = int(name.split(".")[2]), name.split(".", 3)[3]
        found[f"model.layers.{layer + (layer > after)}.{rest}"] = tensor
        if layer == after:
            empty = rest.endswith(("o_proj.weight", "down_proj.weight"))
            found[f"model.layers.{layer + 1}.{rest}"] = torch.zeros_like(tensor) if empty else torch.randn_like(tensor)
    return found, {"num_hidden_layers": config["num_hidden_layers"] + 1}


def saved(folder: Path, out: Path, made: tuple[State, dict[str, int]]) -> Path:
    """As a stock folder."""
    import transformers

    state, changes = made
    config = transformers.LlamaConfig.from_dict({**tiny.read_config(folder), **changes})
    model = transformers.LlamaForCausalLM(config).double()
    model.load_state_dict(state)
    model.save_pretrained(out)
    return out
