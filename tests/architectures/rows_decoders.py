"""The rows of decoders; see rows.py."""

from __future__ import annotations

from architectures.rows import LABELS, LLAMA, TEXT, row

TIED = {**LLAMA, "tie_word_embeddings": True}
WIDE = {**LLAMA, "num_attention_heads": 4, "hidden_size": 32}  # heads of 8, so that a part of them can be rotary
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}

# Phi-3 and Phi-4
row("phi3-lm", "Phi3ForCausalLM", **WIDE, **ENDS)
row("phi3-lm-part-rotary", "Phi3ForCausalLM", **WIDE, **ENDS, **HALF)
row("phi3-lm-tied", "Phi3ForCausalLM", **{**WIDE, "tie_word_embeddings": True}, **ENDS, **HALF)
row("phi3-sequence", "Phi3ForSequenceClassification", **WIDE, **ENDS, **LABELS, **HALF)
row("phi3-token", "Phi3ForTokenClassification", **WIDE, **ENDS, **LABELS)
row("phi3-bare", "Phi3Model", **WIDE, **ENDS)

# Granite and Ministral
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
}
row("granite-lm", "GraniteForCausalLM", **LLAMA, **MULTIPLIED)
row("granite-lm-tied", "GraniteForCausalLM", **TIED, **MULTIPLIED, attention_bias=True, mlp_bias=True)
row("granite-bare", "GraniteModel", **LLAMA, **MULTIPLIED)
row("ministral-lm", "MinistralForCausalLM", **LLAMA, head_dim=4, sliding_window=4)
row("ministral-lm-tied", "MinistralForCausalLM", **TIED, head_dim=4, sliding_window=4)
row("ministral-sequence", "MinistralForSequenceClassification", **LLAMA, head_dim=4, **LABELS)
row(
    "ministral3-lm",
    "Ministral3ForCausalLM",
    **LLAMA,
    head_dim=6,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 100.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4,
    },
)
row("ministral3-token", "Ministral3ForTokenClassification", **LLAMA, **LABELS, head_dim=6)

# SmolLM3: rotary positions in the first layer only
SOME = {"no_rope_layers": [1, 0], **ENDS}
row("smollm3-lm", "SmolLM3ForCausalLM", **LLAMA, **SOME)
row("smollm3-lm-tied-biases", "SmolLM3ForCausalLM", **TIED, **SOME, attention_bias=True, mlp_bias=True)
row("smollm3-lm-biases", "SmolLM3ForCausalLM", **LLAMA, **SOME, attention_bias=True)
row("smollm3-lm-by-interval", "SmolLM3ForCausalLM", **LLAMA, **ENDS, no_rope_layer_interval=2)
row("smollm3-sequence", "SmolLM3ForSequenceClassification", **LLAMA, **SOME, **LABELS)
row("smollm3-question", "SmolLM3ForQuestionAnswering", **LLAMA, **SOME)

# OLMo-3
OLMO3 = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
row("olmo3-lm", "Olmo3ForCausalLM", **LLAMA, **OLMO3)
row("olmo3-lm-tied-biases", "Olmo3ForCausalLM", **TIED, **OLMO3, attention_bias=True)
row("olmo3-sequence", "Olmo3ForSequenceClassification", **LLAMA, **OLMO3, **LABELS)

# GLM and GLM-4: neighbouring pairs on half of each head
GLM = {**LLAMA, **ENDS, "head_dim": 8}
row("glm-lm", "GlmForCausalLM", **GLM)
row("glm-lm-no-bias", "GlmForCausalLM", **GLM, attention_bias=False)
row("glm-lm-tied", "GlmForCausalLM", **{**GLM, "tie_word_embeddings": True})
row("glm-sequence", "GlmForSequenceClassification", **GLM, **LABELS)
row("glm4-lm", "Glm4ForCausalLM", **GLM)
row("glm4-lm-tied", "Glm4ForCausalLM", **{**GLM, "tie_word_embeddings": True}, attention_bias=False)
row("glm4-token", "Glm4ForTokenClassification", **GLM, **LABELS)

# Phi-1 and Phi-2
PHI = {**WIDE, **ENDS}
row("phi-lm", "PhiForCausalLM", **PHI)
row("phi-lm-tied", "PhiForCausalLM", **{**PHI, "tie_word_embeddings": True})
row("phi-lm-relu", "PhiForCausalLM", **PHI, hidden_act="relu")
row("phi-lm-normed", "PhiForCausalLM", **PHI, qk_layernorm=True)
row("phi-sequence", "PhiForSequenceClassification", **PHI, **LABELS)
row("phi-bare", "PhiModel", **PHI)

# StableLM
STABLE = {**WIDE, **ENDS, **HALF}
row("stablelm-lm", "StableLmForCausalLM", **STABLE)
row("stablelm-lm-biases", "StableLmForCausalLM", **STABLE, use_qkv_bias=True, use_parallel_residual=True)
row("stablelm-lm-tied", "StableLmForCausalLM", **{**STABLE, "tie_word_embeddings": True})
row("stablelm-lm-normed", "StableLmForCausalLM", **STABLE, qk_layernorm=True)
row("stablelm-sequence", "StableLmForSequenceClassification", **STABLE, **LABELS)

# StarCoder2
row("starcoder2-lm", "Starcoder2ForCausalLM", **LLAMA, **ENDS)
row("starcoder2-lm-tied", "Starcoder2ForCausalLM", **TIED, **ENDS)
row("starcoder2-lm-no-bias", "Starcoder2ForCausalLM", **LLAMA, **ENDS, use_bias=False)
row("starcoder2-token", "Starcoder2ForTokenClassification", **LLAMA, **ENDS, **LABELS)

# Cohere and Cohere-2
COHERE = {**LLAMA, **ENDS}
row("cohere-lm", "CohereForCausalLM", **COHERE)
row("cohere-lm-tied", "CohereForCausalLM", **TIED, **ENDS)
row("cohere-lm-normed", "CohereForCausalLM", **COHERE, use_qk_norm=True)
row("cohere-lm-biases", "CohereForCausalLM", **COHERE, attention_bias=True)
COHERE2 = {**ENDS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
row("cohere2-lm", "Cohere2ForCausalLM", **LLAMA, **COHERE2)
row("cohere2-lm-tied-biases", "Cohere2ForCausalLM", **TIED, **COHERE2, attention_bias=True)
row("cohere2-bare", "Cohere2Model", **LLAMA, **COHERE2)

# Falcon: the first with shared keys, the large ones with groups, RW with slopes
FALCON = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 11,
    "vocab_size": TEXT["vocab_size"],
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    **ENDS,
}
GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
row("falcon-lm", "FalconForCausalLM", **FALCON)
row("falcon-lm-groups", "FalconForCausalLM", **FALCON, **GROUPS)
row("falcon-lm-groups-one-norm", "FalconForCausalLM", **FALCON, **GROUPS, num_ln_in_parallel_attn=1, bias=True)
row("falcon-lm-tied", "FalconForCausalLM", **{**FALCON, "tie_word_embeddings": True}, bias=True)
row("falcon-lm-heads-biases", "FalconForCausalLM", **FALCON, multi_query=False, bias=True, parallel_attn=False)
row("falcon-lm-alibi", "FalconForCausalLM", **FALCON, multi_query=False, bias=True, parallel_attn=False, alibi=True)
row("falcon-sequence", "FalconForSequenceClassification", **FALCON, **LABELS)
row("falcon-token", "FalconForTokenClassification", **FALCON, **LABELS)
row("falcon-question", "FalconForQuestionAnswering", **FALCON)
row("falcon-bare", "FalconModel", **FALCON)

# Gemma-3
GEMMA3 = {**TIED, **ENDS, "head_dim": 6, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
row("gemma3-lm", "Gemma3ForCausalLM", **GEMMA3)
row("gemma3-lm-untied-biases", "Gemma3ForCausalLM", **{**GEMMA3, "tie_word_embeddings": False}, attention_bias=True)
row("gemma3-text-sequence", "Gemma3TextForSequenceClassification", **GEMMA3, **LABELS)
row("gemma3-text-bare", "Gemma3TextModel", **GEMMA3)

# Language models behind an image tower
SEEN = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 9, "image_size": 8}
IMAGE_TOKEN = {"image_token_index": TEXT["vocab_size"] - 1}
row(
    "gemma3-images-lm",
    "Gemma3ForConditionalGeneration",
    "image and text",
    text_config=GEMMA3,
    **IMAGE_TOKEN,
    vision_config={**SEEN, "patch_size": 4},
    mm_tokens_per_image=4,
)
MISTRAL3 = {
    "vision_config": {**SEEN, "model_type": "pixtral", "image_size": 8, "patch_size": 2, "head_dim": 6},
    **IMAGE_TOKEN,
}
row(
    "mistral3-images-lm",
    "Mistral3ForConditionalGeneration",
    "image and text",
    **MISTRAL3,
    text_config={**LLAMA, "model_type": "mistral", "head_dim": 4},
    tie_word_embeddings=False,
)
row(
    "mistral3-images-lm-tied",
    "Mistral3ForConditionalGeneration",
    "image and text",
    **MISTRAL3,
    text_config={**TIED, "model_type": "mistral", "head_dim": 4},
    tie_word_embeddings=True,
)

# Qwen2-MoE and Qwen3-MoE: experts in the second layer only, or in both
QWEN_MOE = {**LLAMA, "moe_intermediate_size": 7, "num_experts_per_tok": 2}
QWEN2_MOE = {**QWEN_MOE, "num_experts": 3, "shared_expert_intermediate_size": 9}
row("qwen2-moe-lm", "Qwen2MoeForCausalLM", **QWEN2_MOE)
row(
    "qwen2-moe-lm-tied-mixed",
    "Qwen2MoeForCausalLM",
    **{**QWEN2_MOE, "tie_word_embeddings": True},
    mlp_only_layers=[0],
    norm_topk_prob=True,
)
row("qwen2-moe-sequence", "Qwen2MoeForSequenceClassification", **QWEN2_MOE, **LABELS, decoder_sparse_step=2)
row("qwen2-moe-bare", "Qwen2MoeModel", **QWEN2_MOE)
QWEN3_MOE = {**QWEN_MOE, "num_experts": 3, "head_dim": 6}
row("qwen3-moe-lm", "Qwen3MoeForCausalLM", **QWEN3_MOE)
row("qwen3-moe-lm-mixed", "Qwen3MoeForCausalLM", **QWEN3_MOE, decoder_sparse_step=2, norm_topk_prob=True)
row("qwen3-moe-lm-tied", "Qwen3MoeForCausalLM", **{**QWEN3_MOE, "tie_word_embeddings": True}, attention_bias=True)
row("qwen3-moe-token", "Qwen3MoeForTokenClassification", **QWEN3_MOE, **LABELS)

# DeepSeek-V2 and DeepSeek-V3
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 5,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    **ENDS,
}
DEEPSEEK3 = {**LATENT, "q_lora_rank": 12, "n_routed_experts": 6, "n_group": 3, "topk_group": 2}
row("deepseek3-lm", "DeepseekV3ForCausalLM", **DEEPSEEK3)
row(
    "deepseek3-lm-tied",
    "DeepseekV3ForCausalLM",
    **{**DEEPSEEK3, "tie_word_embeddings": True, "n_group": 1, "topk_group": 1},
    rope_interleave=False,
)
row("deepseek3-lm-biases", "DeepseekV3ForCausalLM", **{**DEEPSEEK3, "n_shared_experts": 2}, attention_bias=True)
row("deepseek3-sequence", "DeepseekV3ForSequenceClassification", **DEEPSEEK3, **LABELS)
DEEPSEEK2 = {**LATENT, "n_routed_experts": 6, "n_shared_experts": 2}
row("deepseek2-lm", "DeepseekV2ForCausalLM", **DEEPSEEK2, q_lora_rank=12)
row("deepseek2-lm-lite", "DeepseekV2ForCausalLM", **DEEPSEEK2, q_lora_rank=None)
row(
    "deepseek2-lm-tied-groups",
    "DeepseekV2ForCausalLM",
    **{**DEEPSEEK2, "tie_word_embeddings": True},
    q_lora_rank=12,
    topk_method="group_limited_greedy",
    n_group=3,
    topk_group=2,
)
row("deepseek2-bare", "DeepseekV2Model", **DEEPSEEK2, q_lora_rank=12)

# gpt-oss
GPT_OSS = {**LLAMA, **ENDS, "head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4}
row("gpt-oss-lm", "GptOssForCausalLM", **GPT_OSS)
row("gpt-oss-lm-tied", "GptOssForCausalLM", **{**GPT_OSS, "tie_word_embeddings": True})
row("gpt-oss-sequence", "GptOssForSequenceClassification", **GPT_OSS, **LABELS)

# Qwen3-Next and Qwen3.5
DELTA = {
    **LLAMA,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-3,
}
QWEN3_NEXT = {
    **DELTA,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 9,
}
row("qwen3-next-lm", "Qwen3NextForCausalLM", **QWEN3_NEXT)
row(
    "qwen3-next-lm-tied-mixed",
    "Qwen3NextForCausalLM",
    **{**QWEN3_NEXT, "tie_word_embeddings": True},
    mlp_only_layers=[0],
    attention_bias=True,
)
row("qwen3-next-question", "Qwen3NextForQuestionAnswering", **QWEN3_NEXT)
row("qwen3.5-lm", "Qwen3_5ForCausalLM", **DELTA)
row(
    "qwen3.5-lm-whole-rotary",
    "Qwen3_5ForCausalLM",
    **DELTA,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
)
row("qwen3.5-text-sequence", "Qwen3_5TextForSequenceClassification", **DELTA, **LABELS)
row("qwen3.5-moe-lm", "Qwen3_5MoeForCausalLM", **QWEN3_NEXT)

# Mamba
MAMBA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 3,
    "expand": 2,
    "conv_kernel": 3,
    "time_step_rank": 5,
    "vocab_size": TEXT["vocab_size"],
    "pad_token_id": 0,
    **ENDS,
}
row("mamba-lm", "MambaForCausalLM", **MAMBA)
row("mamba-lm-untied", "MambaForCausalLM", **MAMBA, tie_word_embeddings=False, use_bias=True, use_conv_bias=False)
row("mamba-bare", "MambaModel", **MAMBA)
