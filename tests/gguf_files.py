"""Tiny GGUF files, written with the gguf package as llama.cpp's converter writes them: none of isomerge's code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q

VOCABULARY = 64
BODY = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROUTED = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
# name -> (class, configuration, GGUF's architecture)
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", {**BODY, "head_dim": 32}, "llama"),
    "mistral": ("MistralForCausalLM", {**BODY, "sliding_window": None}, "llama"),
    "mixtral": ("MixtralForCausalLM", {**BODY, "num_local_experts": 3}, "llama"),
    "qwen2": ("Qwen2ForCausalLM", BODY, "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", {**BODY, "head_dim": 32}, "qwen3"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**BODY, **ROUTED, "shared_expert_intermediate_size": 256}, "qwen2moe"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**BODY, **ROUTED, "head_dim": 32, "norm_topk_prob": True}, "qwen3moe"),
    "gemma2": ("Gemma2ForCausalLM", {**BODY, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32,
               "tie_word_embeddings": True}, "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", {**BODY, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32,
               "tie_word_embeddings": True}, "gemma3"),
    "phi3": ("Phi3ForCausalLM", {**BODY, "sliding_window": 128}, "phi3"),
}  # fmt: skip


def stock(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random stock model, gains and biases away from their special values."""
    class_name, config, _ = KINDS[kind]
    family = getattr(transformers, class_name)
    torch.manual_seed(seed)
    made = family._from_config(family.config_class(**{**config, **changes}), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute`: rotary halves as pairs."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


NAMES = (
    (r"model\.embed_tokens\.(.*)", "token_embd.{0}"), (r"model\.norm\.(.*)", "output_norm.{0}"),
    (r"lm_head\.(.*)", "output.{0}"), (r"input_layernorm", "attn_norm"), (r"self_attn\.([qkv])_proj", "attn_{0}"),
    (r"self_attn\.o_proj", "attn_output"), (r"self_attn\.([qk])_norm", "attn_{0}_norm"),
    (r"self_attn\.qkv_proj", "attn_qkv"), (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(gate|up|down)_proj", "ffn_{0}"), (r"(mlp|block_sparse_moe)\.gate", "ffn_gate_inp"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", "ffn_{0}_shexp"), (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"pre_feedforward_layernorm", "ffn_norm"), (r"post_feedforward_layernorm", "post_ffw_norm"),
)  # fmt: skip
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def gguf_tensors(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """The stored tensors of a folder under GGUF's names, in GGUF's order of rows."""
    from safetensors.torch import load_file

    config = KINDS[kind][1]
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        layer, rest = "", name
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            layer, rest = f"blk.{match[1]}.", match[2]
        if match := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", rest):
            stacks.setdefault(f"{layer}ffn_{EXPERTS[match[2]]}_exps.weight", {})[int(match[1])] = values
            continue
        stem, suffix = (rest, "") if not layer else rest.rsplit(".", 1)
        if rest.startswith("post_attention_layernorm"):
            new = "post_attention_norm" if kind.startswith("gemma") else "ffn_norm"
        else:
            new = next(made.format(*match.groups()) for p, made in NAMES if (match := re.fullmatch(p, stem)))
        new = f"{layer}{new}.{suffix}" if layer else new
        if KINDS[kind][2] == "llama" and re.search(r"attn_[qk]\.", new):
            values = paired(values, config["num_attention_heads" if "attn_q" in new else "num_key_value_heads"])
        if kind.startswith("gemma") and new.endswith("norm.weight"):
            values = values + 1
        found[new] = values[0] if "gate_inp_shexp" in new else values
    return found | {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}


def write_gguf(
    kind: str, path: Path, *, seed: int = 0, qtype: Q | None = None, raw: bool = False, **changes: Any
) -> Any:
    """The file, and a folder of the same model beside it; matrices as `qtype`, or with `raw` random blocks of it."""
    model = stock(kind, seed, **changes)
    folder = path.with_suffix("")
    model.save_pretrained(folder)
    config, arch = model.config, KINDS[kind][2]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
    if kind not in ("qwen2", "phi3"):
        writer.add_key_length(head)
    if kind.startswith("gemma") or kind == "phi3":
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "mixtral":
        writer.add_expert_count(config.num_local_experts)
    elif "moe" in kind:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "mixtral" or "moe" in kind:
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    rng = np.random.default_rng(seed)
    for name, values in gguf_tensors(kind, folder).items():
        if values.ndim < 2 or qtype is None or "norm" in name or "gate_inp" in name:
            writer.add_tensor(name, np.ascontiguousarray(values))
            continue
        if raw:  # blocks that the package cannot write: any bytes are some values
            block, size = gguf.GGML_QUANT_SIZES[qtype]
            shape = (*values.shape[:-1], values.shape[-1] // block * size)
            stored = rng.integers(0, 48, shape, dtype=np.uint8)
        else:
            stored = gguf.quantize(np.ascontiguousarray(values), qtype)
        writer.add_tensor(name, stored, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
