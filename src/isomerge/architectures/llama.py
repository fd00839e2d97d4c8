"""Llama, Mistral, Qwen2 and Qwen3: RMSNorm in front, rotary positions, grouped queries, gated feed-forward."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts
from isomerge.symmetry.groups import Rotary, Rotation, SignedPermutation


@architecture("llama", "mistral", "qwen2", "qwen3", summary="pre-RMSNorm, rotary, grouped queries, gated")
def llama(facts: Facts) -> Architecture:
    width, inner = facts["hidden_size"], parts.head_width(facts)
    spaces = parts.attention_spaces(facts) | parts.gated_spaces(facts)
    tensors = parts.attention_tensors() | parts.gated_tensors()
    if facts["model_type"] == "qwen3":  # norms on q and k leave a sign per rotary pair, and a gain that can move
        spaces["qk.{i}"] = Rotary(inner, per=("kv.{i}",), phase="sign", scale=False)
        spaces["gain.{i}"] = Rotary(inner, phase="none")
        tensors[parts.ATTENTION + "q_norm.weight"] = "gain.{i}"
        tensors[parts.ATTENTION + "k_norm.weight"] = "gain.{i}'"
    return parts.rotary_decoder(
        facts,
        {"residual": SignedPermutation(width) if facts.tied else Rotation(width), **spaces},
        tensors,
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": parts.GATE_AND_UP},
        other_prefixes=("transformer.",),  # question answering
    )
