"""Llama, Mistral, Ministral, Granite, Qwen2 and Qwen3: RMSNorm in front, rotary positions, grouped queries, gated feed-forward."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Rotary


@architecture(
    "llama", "mistral", "ministral", "ministral3", "granite", "qwen2", "qwen3",
    summary="pre-RMSNorm, rotary, grouped queries, gated",
)  # fmt: skip
def llama(facts: Facts) -> Architecture:
    inner = parts.head_width(facts)
    spaces = parts.attention_spaces(facts) | parts.gated_spaces(facts)
    tensors = parts.attention_tensors() | parts.gated_tensors()
    if facts["model_type"] == "qwen3":  # norms on q and k leave a sign per rotary pair, and a gain that can move
        spaces["qk.{i}"] = Rotary(inner, per=("kv.{i}",), phase="sign", scale=False)
        spaces["gain.{i}"] = Rotary(inner, phase="none")
        tensors[parts.ATTENTION + "q_norm.weight"] = "gain.{i}"
        tensors[parts.ATTENTION + "k_norm.weight"] = "gain.{i}'"
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **spaces},
        tensors,
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": parts.GATE_AND_UP},
        other_prefixes=("transformer.",),  # question answering
    )
