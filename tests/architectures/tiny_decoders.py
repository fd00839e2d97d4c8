"""Tiny decoders for test_complete.py: one for every structure."""

from __future__ import annotations

from architectures.rows import Row

WIDTH, UNITS, VOCABULARY, POSITIONS = 8, 5, 11, 7
TEXT = {
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": UNITS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
RMS = {**TEXT, "rms_norm_eps": 0.1}
LAYER = {**TEXT, "layer_norm_eps": 0.1, "vocab_size": 41}  # side by side, the first feed-forward sees only tokens
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 3, "shared_expert_intermediate_size": 5}
LATENT = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 3,
    "num_experts_per_tok": 2,
    "n_routed_experts": 2,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 2,
    "v_head_dim": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
DELTA = {
    **RMS,
    "head_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
}
FALCON = {
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "ffn_hidden_size": UNITS,
    "vocab_size": 41,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "bias": True,
}

ROWS = [
    Row("phi3-part-rotary", "Phi3ForCausalLM", {**RMS, **HALF}),
    Row("smollm3-biases", "SmolLM3ForCausalLM", {**RMS, "no_rope_layers": [1, 0], "attention_bias": True}),
    Row("glm", "GlmForCausalLM", {**RMS, **HALF, "head_dim": 4}),
    Row("glm4", "Glm4ForCausalLM", {**RMS, **HALF, "head_dim": 4}),
    Row("olmo3", "Olmo3ForCausalLM", {**RMS, "layer_types": ["sliding_attention", "full_attention"]}),
    Row("gemma3", "Gemma3ForCausalLM", {**RMS, "tie_word_embeddings": True, "head_dim": 4}),
    Row("qwen2-moe", "Qwen2MoeForCausalLM", {**RMS, **EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}),
    Row("qwen3-moe", "Qwen3MoeForCausalLM", {**RMS, **EXPERTS, "head_dim": 4}),
    Row("deepseek3", "DeepseekV3ForCausalLM", {**RMS, **LATENT, "q_lora_rank": 4}),
    Row("deepseek2", "DeepseekV2ForCausalLM", {**RMS, **LATENT, "q_lora_rank": None}),
    Row(
        "gpt-oss",
        "GptOssForCausalLM",
        {**RMS, "vocab_size": 41, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    Row("qwen3.5", "Qwen3_5ForCausalLM", DELTA),
    Row("phi", "PhiForCausalLM", {**LAYER, **HALF}),
    Row("stablelm", "StableLmForCausalLM", {**LAYER, **HALF}),
    Row("starcoder2", "Starcoder2ForCausalLM", {**LAYER, "norm_epsilon": 0.1}),
    Row("cohere", "CohereForCausalLM", LAYER),
    Row("cohere2", "Cohere2ForCausalLM", {**LAYER, "layer_types": ["sliding_attention", "full_attention"]}),
    Row("falcon", "FalconForCausalLM", FALCON),
    Row("falcon-alibi", "FalconForCausalLM", {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}),
]

MAMBA = Row(
    "mamba",
    "MambaForCausalLM",
    {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "state_size": 2,
        "expand": 1,
        "conv_kernel": 2,
        "time_step_rank": 2,
        "vocab_size": 23,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 0.1,
    },
)
