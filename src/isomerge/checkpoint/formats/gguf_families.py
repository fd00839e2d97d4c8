"""What GGUF calls the settings of a config.json, by kind of model; a table for reading and for writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Setting = tuple[str, str, str]
"""The metadata's name, config.json's name, and the type that it is written in."""

COMMON: tuple[Setting, ...] = (
    ("context_length", "max_position_embeddings", "uint32"),
    ("block_count", "num_hidden_layers", "uint32"),
    ("embedding_length", "hidden_size", "uint32"),
    ("feed_forward_length", "intermediate_size", "uint32"),
    ("attention.head_count", "num_attention_heads", "uint32"),
    ("attention.head_count_kv", "num_key_value_heads", "uint32"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", "float32"),
)
HEAD: Setting = ("attention.key_length", "head_dim", "uint32")
WINDOW: Setting = ("attention.sliding_window", "sliding_window", "uint32")
CAPS: tuple[Setting, ...] = (
    ("attn_logit_softcapping", "attn_logit_softcapping", "float32"),
    ("final_logit_softcapping", "final_logit_softcapping", "float32"),
)
USED: Setting = ("expert_used_count", "num_experts_per_tok", "uint32")
EXPERTS: tuple[Setting, ...] = (
    ("expert_count", "num_experts", "uint32"),
    USED,
    ("expert_feed_forward_length", "moe_intermediate_size", "uint32"),
)


@dataclass(frozen=True)
class GgufFamily:
    """One kind of model, as llama.cpp's converter writes it."""

    arch: str
    """GGUF's name for it."""
    model_type: str
    class_name: str
    settings: tuple[Setting, ...]
    """Beside the common ones."""
    pairs: bool = False
    """Query and key rows are stored as rotary pairs (0, 1), (2, 3)…, where transformers rotates halves."""
    shifted: bool = False
    """Gains of norms are stored as 1 + weight."""
    fixed: tuple[tuple[str, bool], ...] = ()
    """What its program takes for granted, where the class has another default."""
    wide_queries: int | None = None
    """With this many layers queries are scaled by hidden size over heads, and by the width of a head otherwise; None:
    config.json does not say how."""
    local_theta: float | None = None
    """The rotary base of its sliding layers, which the metadata does not have."""
    split_heads: bool = True
    """Whether config.json has the width of a head."""


FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily("llama", "llama", "LlamaForCausalLM", (HEAD,), pairs=True),
    GgufFamily("llama", "mistral", "MistralForCausalLM", (HEAD,), pairs=True),
    GgufFamily(
        "llama", "mixtral", "MixtralForCausalLM", (HEAD, ("expert_count", "num_local_experts", "uint32"), USED),
        pairs=True,
    ),
    GgufFamily("qwen2", "qwen2", "Qwen2ForCausalLM", ()),
    GgufFamily("qwen3", "qwen3", "Qwen3ForCausalLM", (HEAD,)),
    GgufFamily(
        "qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM",
        (*EXPERTS, ("expert_shared_feed_forward_length", "shared_expert_intermediate_size", "uint32")),
        fixed=(("norm_topk_prob", False),),
    ),
    GgufFamily("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", (HEAD, *EXPERTS), fixed=(("norm_topk_prob", True),)),
    GgufFamily("gemma2", "gemma2", "Gemma2ForCausalLM", (HEAD, WINDOW, *CAPS), shifted=True, wide_queries=46),
    GgufFamily(
        "gemma3", "gemma3_text", "Gemma3ForCausalLM", (HEAD, WINDOW), shifted=True, wide_queries=62, local_theta=1e4,
    ),
    GgufFamily("phi3", "phi3", "Phi3ForCausalLM", (WINDOW,), split_heads=False),
)  # fmt: skip


def family_read(metadata: Mapping[str, object]) -> GgufFamily | None:
    """The kind of model that a file's metadata names; None for one that is not in the table."""
    arch = metadata.get("general.architecture")
    known = [family for family in FAMILIES if family.arch == arch]
    experts = metadata.get(f"{arch}.expert_count")
    routed = [family for family in known if any(one[0] == "expert_count" for one in family.settings)]
    chosen = routed if experts else [family for family in known if family not in routed]
    return chosen[0] if chosen else None


def family_written(model_type: object) -> GgufFamily | None:
    """The kind of model that a config.json names."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)


def query_width(family: GgufFamily, layers: int, hidden: int, heads: int, head: int) -> int:
    """By what the program divides queries, squared: config.json's query_pre_attn_scalar."""
    return hidden // heads if layers == family.wide_queries else head
