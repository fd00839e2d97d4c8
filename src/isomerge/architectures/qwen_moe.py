"""Qwen2-MoE and Qwen3-MoE: the attention of Qwen2 and Qwen3, and experts; in the first, one that every token meets."""

from isomerge.architectures import architecture, parts
from isomerge.architectures import expert_parts as experts
from isomerge.symmetry.architecture import Architecture, Facts

SHARED_GATE = experts.MLP + "shared_expert_gate.weight"


@architecture("qwen2_moe", "qwen3_moe", summary="pre-RMSNorm, rotary, grouped queries, experts behind a router")
def qwen_moe(facts: Facts) -> Architecture:
    spaces, tensors = parts.attention_spaces(facts), parts.attention_tensors()
    readers: tuple[str, ...] = experts.READERS
    shared = 0
    if facts["model_type"] == "qwen3_moe":
        spaces |= parts.normed_spaces(facts)
        tensors |= parts.NORMED
    else:
        shared = facts["shared_expert_intermediate_size"]
        tensors |= experts.shared_tensors("shared_expert") | {SHARED_GATE: "_one residual'"}
        readers = (*readers, *experts.shared_readers("shared_expert"), SHARED_GATE)
    units, count = facts["moe_intermediate_size"], experts.expert_count(facts)
    return parts.rotary_decoder(
        facts,
        {
            "residual": parts.stream(facts),
            **spaces,
            **experts.expert_spaces(count, units, shared),
            **experts.dense_spaces(facts),
        },
        {**tensors, **experts.expert_tensors(), **experts.dense_tensors()},
        norms={"input_layernorm": parts.QKV, **experts.norms_before(readers)},
        gauges=[experts.ROUTER_SHIFT],
        stack=experts.STACK,
        repeat=experts.layers_of_either_kind(facts, experts.sparse_by_step(facts)),
    )
