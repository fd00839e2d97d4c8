"""Llama, Mistral, Ministral, Granite, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, gated units."""

from isomerge.architectures import architecture, parts
from isomerge.symmetry.architecture import Architecture, Facts


@architecture(
    "llama", "mistral", "ministral", "ministral3", "granite", "qwen2", "qwen3",
    summary="pre-RMSNorm, rotary, grouped queries, gated",
)  # fmt: skip
def llama(facts: Facts) -> Architecture:
    spaces = parts.attention_spaces(facts) | parts.gated_spaces(facts)
    tensors = parts.attention_tensors() | parts.gated_tensors()
    if facts["model_type"] == "qwen3":
        spaces |= parts.normed_spaces(facts)
        tensors |= parts.NORMED
    return parts.rotary_decoder(
        facts,
        {"residual": parts.stream(facts), **spaces},
        tensors,
        norms={"input_layernorm": parts.QKV, "post_attention_layernorm": parts.GATE_AND_UP},
        other_prefixes=("transformer.",),  # question answering
    )
