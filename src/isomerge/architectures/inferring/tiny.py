"""A tiny model of the same kind: a config.json with its numbers shrunk, for proofs that take milliseconds.

Only the numbers are changed: kinds of layers, activations, ties and layouts stay those of the real config. Different
sizes get different numbers wherever the class allows it, so that two axes of one length usually mean one space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WIDTH, HEADS, GROUPS, HEAD_WIDTH, DEPTH = 32, 4, 2, 8, 2
VOCABULARY = 67

# The first expression that a key matches says what the number becomes: at most this, or a function of it.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(_|^)(token_id|token_ids|token_index|token_idx)$|^(image|audio|video)_token$", "token"),
    (r"^(vocab_size|vocabulary_size|n_vocab|.*vocab_size.*|n_positions_vocab)$", VOCABULARY),
    (r"conv_kernel|kernel_size|conv_bias|stride|dilation|padding", None),
    (r"^(vision_feature_layer|layer_norm_.*|initializer.*|.*_eps|.*dropout.*|.*_prob|.*_range|.*_loss.*|.*_rate)$", None),
    (r"(num_nextn_predict_layers|num_mtp|mtp_num|n_mtp)", 0),
    (r"(num_dense_layers|first_k_dense_replace|num_hash_layers|n_dense)", 1),
    (r"(full_attention_interval|attn_layer_period|expert_layer_period|sliding_window_pattern|moe_layer_freq)", 2),
    (r"(attn_layer_offset|expert_layer_offset|_layer_offset)$", 1),
    (r"(num_key_value_heads|num_kv_heads|num_query_groups|multi_query_group_num|n_kv_heads|kv_n_heads|num_kv)", "groups"),
    (r"(linear_num_key_heads|mamba_n_groups|n_groups|mamba_num_groups|ssm_groups)$", 2),
    (r"(linear_num_value_heads|mamba_n_heads|mamba_num_heads|ssm_heads)$", 4),
    (r"^n_group$|topk_group|num_expert_groups|expert_groups", 1),
    (r"(index|indexer).*heads|num_index", 2),
    (r"(experts_per_tok|num_experts_per|moe_topk|moe_top_k|router_topk|^top_k|top_k$|topk$|moe_k$|experts_topk)", 2),
    (r"(zero_expert_num|n_shared_experts|num_shared_experts|shared_expert_num)", 1),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed|n_experts|_expert_num|num_moe_experts)$", 4),
    (r"(attention_heads|num_heads|n_heads?|num_attn_heads)$", HEADS),
    (r"(layers|n_layers?|num_layers|num_blocks|depth|n_layer|num_hidden_groups)$", DEPTH),
    (r"qk_nope_head_dim|qk_head_dim_nope|index_head_dim", 8),
    (r"qk_rope_head_dim|rope_head_dim|rotary_dim|rotary_ndims", 4),
    (r"qk_head_dim", 12),
    (r"v_head_dim|value_head_dim", 10),
    (r"(head_dim|head_size|d_kv|attention_head_size|kv_channels|d_head|attention_key_size|dim_head|head_width)$", HEAD_WIDTH),
    (r"q_lora_rank|q_rank", 14),
    (r"kv_lora_rank|kv_rank", 18),
    (r"lora_rank|_rank$", 6),
    (r"moe_intermediate_size|moe_ffn|expert_ffn|moe_inter|expert_intermediate|expert_hidden|expert_dim", 20),
    (r"shared_expert_intermediate_size|shared_intermediate|shared_expert", 24),
    (r"(intermediate_size|ffn_dim|d_ff|ffn_hidden|n_inner|hidden_dim|ffn_size|intermediate_dim|ffn_hidden_size|feed_forward|"
     r"block_ff_dim|inner_dim|d_inner|dim_ff|ff_dim|ffn_hidden_dim|ffw_hidden_size|mlp_hidden|ffn_intermediate)", 44),
    (r"(hidden_size_per_layer|per_layer_input|ple_)", 12),
    (r"^(embedding_size|embedding_dim|embed_proj_dim|lm_embedding)$", 24),
    (r"(hidden_size|d_model|n_embd|embed_dim|^dim$|d_embed|hidden_dim|word_embed_proj_dim|emb_dim|model_dim|projection_dim|"
     r"lru_width|conv_dim|d_latents|d_embedding|embedding_size|proj_size|attention_hidden|proj_dim|logit_dim)", WIDTH),
    (r"(max_position|n_positions|max_seq|max_source|max_target|n_ctx|seq_len|max_length|positions|context_length|max_2d)", 64),
    (r"^window_size$", 2),
    (r"(sliding_window|attention_window|attn_window|chunk_size|window_size|local_window|attention_chunk|index_topk)", 16),
    (r"(state_size|d_state|ssm_state)", 6),
    (r"(image_size|input_size|img_size|crop_size)$", 32),
    (r"^patch_size$|temporal_patch", 8),
    (r"num_labels", 5),
    (r"(num_register_tokens|num_memory|num_latents|num_mem|meta_tokens)", 4),
)  # fmt: skip
COUNTED = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"}  # made from the depth
LISTS = re.compile(r"(hidden_sizes|depths|num_heads|embed_dims|num_attention_heads|widths|channels|dims?|layer_sizes|repeats|filters|neck)")


def tiny_config(config: Mapping[str, Any], *, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """The config with every size shrunk; parts within it alike."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key in COUNTED:
            continue
        if isinstance(value, Mapping):
            small[key] = tiny_config(value, vocabulary=vocabulary) if not _is_labels(key) else value
        elif isinstance(value, list):
            small[key] = _small_list(key, value)
        elif type(value) is int:
            small[key] = _small(key, value, config)
        else:
            small[key] = value
    return _consistent(small, config)


def _is_labels(key: str) -> bool:
    return key in ("id2label", "label2id", "quantization_config")


def _rule(key: str) -> Any:
    return next((size for pattern, size in SIZES if re.search(pattern, key)), None)


def _small(key: str, value: int, config: Mapping[str, Any]) -> int:
    rule = _rule(key)
    if rule is None:
        return value
    if rule == "token":
        return value if value < 0 else min(value, 3 + sum(map(ord, key)) % 50)
    if rule == "groups":
        heads = next((v for k, v in config.items() if _rule(k) == HEADS and type(v) is int), None)
        return HEADS if value == heads else min(value, GROUPS)
    return min(value, rule) if value >= 0 else value


def _small_list(key: str, value: list[Any]) -> list[Any]:
    if "layer_types" in key or key.endswith("_types") or key.endswith("_layers_block_type"):
        return value
    if not LISTS.search(key) or not value or not all(type(v) is int for v in value):
        return value
    if "heads" in key:
        return [max(1, 2 * v // min(value)) for v in value]
    if min(value) >= 16:
        least = min(value)
        return [max(8, round(16 * v / least)) for v in value]
    return [min(v, 2) if "depth" in key or "layer" in key or "repeat" in key else v for v in value]


def _consistent(small: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with one entry per layer are cut to the layers that are left."""
    depths = {v: small[k] for k, v in config.items() if type(v) is int and v > 0 and _rule(k) == DEPTH}
    for key, value in small.items():
        if isinstance(value, list) and len(value) in depths and not LISTS.search(key):
            small[key] = value[: depths[len(value)]]
    if "window_size" in small and "image_size" in small and "depths" in small:
        small["image_size"] = 64  # windows at every stage
    return small
