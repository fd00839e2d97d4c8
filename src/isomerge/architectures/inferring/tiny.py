"""A tiny model of the same kind: a config.json with its numbers shrunk, for proofs that take milliseconds.

Only numbers are changed: kinds of layers, activations, ties and layouts stay those of the config. Of the layers one of
every kind is kept. Different sizes become different numbers wherever the class allows it; where a class wants two of
them equal, another of the `VARIANTS` serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# The first expression that a key matches names its size; what matches none keeps its number.
SIZES: tuple[tuple[str, str], ...] = (
    (r"_token_ids?$|_token_index$|_token_idx$|^(image|audio|video)_token$|_token$", "token"),
    (r"initializer|_eps|dropout|_prob$|_range|_loss|_rate$|kernel|stride|dilation|padding|_factor|temperature", "keep"),
    (r"vocab_size|vocabulary_size|n_vocab", "vocabulary"),
    (r"num_nextn_predict_layers|num_mtp|mtp_num|n_mtp", "none"),
    (r"num_dense_layers|first_k_dense_replace|num_hash_layers|n_dense|_layer_offset$", "one"),
    (r"full_attention_interval|attn_layer_period|expert_layer_period|sliding_window_pattern|moe_layer_freq", "two"),
    (r"num_key_value_heads|num_kv_heads|num_query_groups|multi_query_group_num|n_kv_heads|kv_n_heads", "groups"),
    (r"linear_num_key_heads|(^|_)n_groups$|_num_groups$|ssm_groups", "two"),
    (r"linear_num_value_heads|^[a-z]{5}_(n|num)_heads$|ssm_heads", "state_heads"),
    (r"^n_group$|topk_group|expert_groups", "one"),
    (r"(index|indexer).*heads|num_index", "two"),
    (r"experts_per_tok|num_experts_per|moe_top_?k|router_topk|top_k$|topk$|moe_k$", "chosen"),
    (r"zero_expert_num|n_shared_experts|num_shared_experts|shared_expert_num", "one"),
    (r"(num_local_experts|num_experts|n_routed_experts|num_routed|n_experts|_expert_num|num_moe_experts)$", "experts"),
    (r"(attention_heads|num_heads|n_heads?|num_attn_heads)$", "heads"),
    (r"(layers|num_blocks|depth|n_layer|num_hidden_groups)$", "depth"),
    (r"_d_head$|^[a-z]{5}_head_dim$|ssm_head_dim", "state_head"),
    (r"qk_nope_head_dim|qk_head_dim_nope|index_head_dim", "head"),
    (r"qk_rope_head_dim|rope_head_dim|rotary_dim|rotary_ndims", "rotary"),
    (r"qk_head_dim", "qk_head"),
    (r"v_head_dim|value_head_dim", "value_head"),
    (r"head_dim|head_size|d_kv|attention_head_size|kv_channels|d_head|key_size|dim_head|head_width", "head"),
    (r"q_lora_rank|q_rank", "q_rank"),
    (r"kv_lora_rank|kv_rank", "kv_rank"),
    (r"lora_rank|_rank$", "rank"),
    (r"moe_intermediate|moe_ffn|expert_ffn|moe_inter|expert_intermediate|expert_hidden|expert_dim", "expert_units"),
    (r"shared_intermediate|shared_expert", "shared_units"),
    (r"intermediate|ffn_dim|d_ff|ffn_hidden|n_inner|ffn_size|feed_forward|block_ff|inner_dim|d_inner|ff_dim|mlp_hidden|ffw",
     "units"),
    (r"hidden_size_per_layer|per_layer_input|ple_", "extra"),
    (r"bottleneck|true_hidden", "bottleneck"),
    (r"^(embedding_size|embedding_dim|embed_proj_dim)$", "embedding"),
    (r"hidden_size|d_model|n_embd|embed_dim|^dim$|d_embed|hidden_dim|word_embed_proj_dim|emb_dim|model_dim|projection_dim|"
     r"lru_width|conv_dim|d_latents|proj_size|attention_hidden|proj_dim", "width"),
    (r"max_position|n_positions|max_seq|max_source|max_target|n_ctx|seq_len|max_length|positions|context_length|max_2d",
     "positions"),
    (r"^window_size$", "two"),
    (r"sliding_window|attention_window|attn_window|chunk_size|window_size|local_window|attention_chunk|index_topk",
     "window"),
    (r"state_size|d_state|ssm_state", "state"),
    (r"(image_size|input_size|img_size|crop_size)$", "image"),
    (r"^patch_size$|temporal_patch", "patch"),
    (r"num_labels", "labels"),
    (r"num_stages|num_encoder_blocks|num_blocks_stages", "stages"),
    (r"num_register_tokens|num_memory|num_latents|num_mem|meta_tokens", "four"),
)  # fmt: skip
NUMBERS = {
    "vocabulary": 67, "none": 0, "one": 1, "two": 2, "four": 4, "chosen": 2, "experts": 4, "heads": 4, "groups": 2,
    "state_heads": 4, "state_head": 16, "head": 8, "rotary": 4, "qk_head": 12, "value_head": 10, "q_rank": 14,
    "kv_rank": 18, "rank": 6, "expert_units": 20, "shared_units": 24, "units": 44, "extra": 12, "bottleneck": 16,
    "embedding": 24, "width": 32, "positions": 64, "window": 16, "state": 6, "image": 32, "patch": 8, "labels": 5,
    "stages": 2,
}  # fmt: skip
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"embedding": 32}, {"groups": 4}, {"rotary": 8, "qk_head": 16, "value_head": 8},
    {"stages": 4, "image": 64}, {"image": 64}, {"value_head": 8, "qk_head": 12}, {"units": 64, "state_head": 8},
    {"groups": 4, "embedding": 32, "image": 128, "width": 64, "head": 16, "units": 64},
)  # fmt: skip
COUNTED = {"stage_names", "out_features", "out_indices", "_out_features", "_out_indices"}  # made from the depth
STAGES = re.compile(r"hidden_sizes|depths|num_heads$|embed_dims|^widths|channels|dims?$|layer_sizes|repeats|filters")
MOST_LAYERS, LEAST_LAYERS = 4, 2


def tiny_configs(config: Mapping[str, Any], *, all_layers: bool = False) -> Iterator[dict[str, Any]]:
    """Tiny configs of the same kind, the likeliest first; narrow alone, with `all_layers`."""
    for changes in VARIANTS:
        yield tiny_config(config, {**NUMBERS, **changes}, all_layers=all_layers)


def tiny_config(
    config: Mapping[str, Any], numbers: Mapping[str, int] = NUMBERS, *, all_layers: bool = False
) -> dict[str, Any]:
    """The config with every size shrunk; the parts within it alike."""
    layers = list(range(_depth(config))) if all_layers else kept_layers(config)
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key in COUNTED:
            continue
        if key in ("id2label", "label2id", "quantization_config"):
            small[key] = value
        elif isinstance(value, Mapping):
            inner = tiny_config(value, numbers, all_layers=all_layers)
            small[key] = _by_layer(value, layers) if _numbers_layers(value) else inner
        elif isinstance(value, (list, tuple)):
            small[key] = _small_list(key, list(value), layers, numbers, config)
        elif type(value) is int:
            small[key] = _small(key, value, config, numbers)
            if size_of(key) == "depth" and value > 0:
                small[key] = value if all_layers else len(layers)
        else:
            small[key] = value
    return _completed(small, numbers)


def size_of(key: str) -> str:
    """The name of the size that a key of a config holds.

    >>> size_of("num_attention_heads"), size_of("intermediate_size"), size_of("rms_norm_eps")
    ('heads', 'units', 'keep')
    """
    return next((size for pattern, size in SIZES if re.search(pattern, key)), "keep")


def kept_layers(config: Mapping[str, Any]) -> list[int]:
    """The layers of the tiny model: the first of every kind, two at least."""
    depth = _depth(config)
    lists = [v for k, v in config.items() if isinstance(v, (list, tuple)) and _per_layer(k, v, depth)]
    first: dict[str, int] = {}
    for i in range(depth):
        first.setdefault(str([v[i] for v in lists]), i)
    kept = sorted(first.values())[:MOST_LAYERS]
    more = [i for i in range(depth) if i not in kept]
    return sorted([*kept, *more[: max(0, LEAST_LAYERS - len(kept))]])


def _depth(config: Mapping[str, Any]) -> int:
    return max((v for k, v in config.items() if size_of(k) == "depth" and type(v) is int), default=LEAST_LAYERS)


def _per_layer(key: str, value: Any, depth: int) -> bool:
    return (
        len(value) == depth and depth > 1 and (depth > 6 or "layer" in key) and not (STAGES.search(key) and depth < 7)
    )


def _numbers_layers(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(str(key).isdigit() for key in value)


def _by_layer(value: Mapping[Any, Any], layers: list[int]) -> dict[Any, Any]:
    by_number = {int(k): v for k, v in value.items()}
    return {new: by_number[old] for new, old in enumerate(layers) if old in by_number}


def _small(key: str, value: int, config: Mapping[str, Any], numbers: Mapping[str, int]) -> int:
    size = size_of(key)
    if size == "keep" or value < 0:
        return value
    if size == "depth":
        return min(value, LEAST_LAYERS)
    if size == "token":
        return min(value, 3 + sum(map(ord, key)) % 50)
    if size == "groups":
        heads = max((v for k, v in config.items() if size_of(k) == "heads" and type(v) is int), default=0)
        return min(heads, numbers["heads"]) if value == heads else min(value, numbers["groups"])
    return min(value, numbers[size])


def _small_list(
    key: str, value: list[Any], layers: list[int], numbers: Mapping[str, int], config: Mapping[str, Any]
) -> list[Any]:
    if _per_layer(key, value, _depth(config)):
        value = [value[i] for i in layers]
        return [_small(key, v, config, numbers) if type(v) is int else v for v in value]
    if not value or not all(type(v) is int for v in value) or not STAGES.search(key):
        return [min(v, numbers["vocabulary"] - 1) if type(v) is int and size_of(key) == "token" else v for v in value]
    value = value[: numbers["stages"]]
    if "heads" in key:
        return [max(1, 2 * v // min(value)) for v in value]
    if min(value) >= 16:
        return [max(8, round(16 * v / min(value))) for v in value]
    return [min(v, 2) for v in value] if re.search(r"depth|layer|repeat", key) else value


def _completed(small: dict[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """What a config leaves open although its class needs it, and what has to agree."""
    for key, value in small.items():
        if value is None and size_of(key) == "groups":
            small[key] = next((v for k, v in small.items() if size_of(k) == "heads" and type(v) is int), None)
        if value is None and (key == "rope_theta" or size_of(key) == "chosen"):
            small[key] = 10000.0 if key == "rope_theta" else numbers["chosen"]
    if "expand" in small and "state_size" in small and type(small.get("head_dim")) is int and "num_heads" in small:
        small["num_heads"] = int(small["expand"] * small["hidden_size"]) // small["head_dim"]
    return small
