"""Phi-3 and Phi-4: Llama's blocks with q, k and v in one projection, gate and up in another."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts

QKV, GATE_UP = parts.ATTENTION + "qkv_proj.weight", parts.MLP + "gate_up_proj.weight"


@architecture("phi3", summary="pre-RMSNorm, partial rotary, grouped queries, fused projections, gated")
def phi3(facts: Facts) -> Architecture:
    spaces = parts.attention_spaces(facts, rotary=parts.rotary_width(facts, parts.head_width(facts)))
    query, key = parts.inner_axes(spaces)
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **spaces, **parts.gated_spaces(facts)},
        {
            QKV: f"[kv.{{i}} query.{{i}} {query} | kv.{{i}} {key} | kv.{{i}} vo.{{i}}] residual'",
            parts.ATTENTION + "o_proj.weight": "residual (kv.{i} query.{i} vo.{i}')",
            **parts.gated_in_one(),
        },
        norms={"input_layernorm": (QKV,), "post_attention_layernorm": (GATE_UP,)},
    )
